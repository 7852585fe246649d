"""A queue knows which prompts its worker's present step completes, cuts, and leaves for later."""

import math
from random import Random

import pytest

from pdserve.request import RequestId
from router.cost import prefill_terms
from router.prompt_queue import NO_TERMS, PromptQueue

A, B, C, D, BEFORE = (RequestId(name) for name in ("a", "b", "c", "d", "before"))


def _queue(*num_tokens: int) -> PromptQueue:
    """Returns a queue whose worker begins its first step when all are there."""
    queue = PromptQueue(1000.0)
    queue.push(BEFORE, prefill_terms(10, 0), 0.0)
    for request_id, count in zip((A, B, C, D), num_tokens, strict=False):
        queue.push(request_id, prefill_terms(count, 0), 0.0)
    queue.pop(BEFORE, 1.0)
    return queue


def test_an_idle_worker_computes_its_first_prompt_alone() -> None:
    queue = PromptQueue(1000.0)
    queue.push(A, prefill_terms(400, 100), 2.0)
    queue.push(B, prefill_terms(300, 0), 2.1)
    assert queue.head == prefill_terms(400, 100)
    assert (queue.done, queue.since_s) == (NO_TERMS, 2.0)


def test_prompts_that_fit_share_a_step_and_its_fixed_time() -> None:
    queue = _queue(400, 300, 200)
    assert queue.head == (1.0, 900.0, sum(prefill_terms(one, 0)[2] for one in (400, 300, 200)))


def test_a_step_takes_a_part_of_the_prompt_that_does_not_fit() -> None:
    queue = _queue(700, 800)
    assert queue.head == (1.0, 1000.0, 700 * 350 + 300 * 150)
    assert queue.pop(A, 5.0)
    # The rest of it goes on from there, behind the part that is computed.
    assert queue.done == (0.0, 300.0, 300 * 150)
    assert queue.head == prefill_terms(500, 300)
    assert queue.since_s == 5.0


def test_a_long_prompt_takes_as_many_chunks_as_it_needs() -> None:
    queue = _queue(2600, 300, 300)
    assert queue.head[:2] == (3.0, 3000.0)
    assert queue.pop(A, 9.0)
    # Its last chunk had room for the one behind it, which is told next, and a part of another.
    assert queue.done[1] == 100.0
    assert queue.head == prefill_terms(200, 100)


def test_what_ended_with_the_same_step_does_not_begin_another_one() -> None:
    queue = _queue(400, 500, 900)
    assert queue.pop(A, 3.0)
    head, done = queue.head, queue.done
    assert (head[1], done[1]) == (800.0, 100.0)
    assert queue.pop(B, 3.0)
    assert (queue.head, queue.done) == (head, done)


def test_what_is_told_late_ended_late() -> None:
    queue = _queue(400, 500, 900)
    queue.pop(A, 3.0)
    queue.pop(B, 3.5)
    assert queue.since_s == 3.5


def test_a_prompt_that_comes_while_the_last_ones_are_told_begins_when_they_are() -> None:
    queue = _queue(400, 500)
    queue.pop(A, 3.0)
    queue.push(C, prefill_terms(100, 0), 3.1)
    assert queue.head == NO_TERMS
    assert queue.pop(B, 3.2)
    assert queue.head == prefill_terms(100, 0)


def test_a_cancelled_prompt_behind_the_step_changes_nothing() -> None:
    queue = _queue(900, 300, 500)
    head = queue.head
    assert not queue.pop(C, 1.0)
    assert queue.head == head
    # Nor does one that was cut, but nobody goes on with it.
    assert not queue.pop(B, 1.0)
    queue.push(D, prefill_terms(600, 0), 1.0)
    queue.pop(A, 2.0)
    assert (queue.done, queue.head) == (NO_TERMS, prefill_terms(600, 0))


def test_a_worker_that_comes_back_begins_with_the_first_prompt() -> None:
    queue = _queue(700, 800)
    queue.pop(A, 5.0)
    queue.push(C, prefill_terms(100, 0), 6.0)
    queue.restart(500.0, 8.0)
    assert (queue.done, queue.since_s, queue.head[:2]) == (NO_TERMS, 8.0, (2.0, 800.0))


def test_steps_of_a_worker_that_nobody_knows_have_no_end() -> None:
    queue = PromptQueue(math.inf)
    queue.push(A, prefill_terms(100_000, 0), 0.0)
    assert queue.head == prefill_terms(100_000, 0)


@pytest.mark.parametrize("seed", range(5))
def test_steps_as_a_worker_makes_them_are_known_token_for_token(seed: int) -> None:
    """Plays a worker that fills its steps in the order of the queue."""
    random = Random(seed)
    queue, left = PromptQueue(1000.0), dict[RequestId, int]()
    for number in range(300):
        for _ in range(random.choice((0, 1, 3))):
            name = RequestId(f"{number}-{len(left)}")
            left[name] = size = random.choice((30, 400, 900))
            is_idle = not len(queue)
            queue.push(name, prefill_terms(size, 0), float(number))
            if is_idle:
                step = {name: size}
        if not left:
            continue
        assert queue.head[1] == sum(step.values())
        ended = [name for name, count in step.items() if left[name] == count]
        left = {name: count - step.get(name, 0) for name, count in left.items()}
        for name in ended:
            del left[name]
            queue.pop(name, float(number))
        step, room = {}, 1000
        for name, count in left.items():
            if room > 0:
                step[name] = min(count, room)
                room -= step[name]
    assert queue.done[1] >= 0
