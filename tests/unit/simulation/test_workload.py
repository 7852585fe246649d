import statistics
from itertools import pairwise

import pytest

from simulation.generators import (
    Lengths,
    make_agent_tree,
    make_arrival_times,
    make_hot_prefix,
    make_plain,
)
from simulation.sampling import take_busiest, take_stretch
from simulation.workload import (
    Arrival,
    Piece,
    Workload,
    cut_time,
    limit_lengths,
    make_workload,
    scale_lengths,
    scale_rate,
)


def arrival(at_s: float, *pieces: tuple[int, int], output: int = 4) -> Arrival:
    return Arrival(
        at_s=at_s,
        pieces=tuple(Piece(*piece) for piece in pieces),
        num_output_tokens=output,
    )


def shared_tokens(one: Arrival, other: Arrival) -> int:
    count = 0
    for left, right in zip(one.prompt(), other.prompt(), strict=False):
        if left != right:
            return count
        count += 1
    return count


def test_a_prompt_is_its_pieces_one_after_the_other():
    assert arrival(0, (7, 2), (9, 3)).prompt() == (7, 7, 9, 9, 9)


@pytest.mark.parametrize("divisor", [2, 3, 7, 16, 1000])
def test_divided_lengths_keep_what_was_shared(divisor: int):
    first = arrival(0, (1, 512), (2, 512), (3, 512), (4, 90), output=100)
    second = arrival(1, (1, 512), (2, 512), (5, 512), output=1)
    third = arrival(1, (6, 512), (2, 512))
    scaled = scale_lengths(make_workload("w", [first, second, third]), divisor)
    one, two, three = scaled.arrivals
    assert shared_tokens(one, two) == round(1024 / divisor)
    assert shared_tokens(one, three) == 0
    assert one.num_prompt_tokens == max(1, round(1626 / divisor))
    assert (one.num_output_tokens, two.num_output_tokens) == (max(1, round(100 / divisor)), 1)


def test_a_rate_is_scaled_in_time_alone():
    workload = make_workload("w", [arrival(2, (1, 5)), arrival(6, (2, 5))])
    faster = scale_rate(workload, 2)
    assert [one.at_s for one in faster.arrivals] == [1, 3]
    assert faster.num_prompt_tokens == workload.num_prompt_tokens
    assert faster.duration_s == 2


def test_what_is_too_long_is_left_out_and_said():
    workload = make_workload("w", [arrival(0, (1, 5)), arrival(1, (1, 50))])
    limited = limit_lengths(workload, 20)
    assert len(limited.arrivals) == 1
    assert "1 longer than 20" in limited.name
    assert limit_lengths(workload, 100) is workload


def test_time_is_cut():
    workload = make_workload("w", [arrival(3, (1, 5)), arrival(1, (1, 5))])
    assert [one.at_s for one in cut_time(workload, 3).arrivals] == [1]


def test_the_busiest_stretch_is_taken_behind_a_warm_up():
    times = [*range(100), *(100 + i / 10 for i in range(40)), *range(110, 200)]
    workload = make_workload("w", [arrival(at_s, (1, 10)) for at_s in times])
    sample = take_busiest(workload, 40)
    assert sample.num_warm_up == 10
    assert len(sample.workload.arrivals) == 40
    assert sample.workload.arrivals[0].at_s == 0
    counted = sample.workload.arrivals[10:]
    assert counted[-1].at_s - counted[0].at_s == pytest.approx(2.9)
    assert "30 of 230 requests" in sample.text


def test_stretches_follow_one_another():
    workload = make_workload("w", [arrival(at_s, (1, 10)) for at_s in range(100)])
    first, second = (take_stretch(workload, 40, number) for number in (0, 1))
    assert (first.num_warm_up, second.num_warm_up) == (10, 10)
    assert [one.at_s for one in second.workload.arrivals] == list(range(40))
    assert "from 10 s on" in first.text
    assert "from 50 s on" in second.text
    with pytest.raises(AssertionError, match="beyond the end"):
        take_stretch(workload, 40, 2)


def test_a_short_workload_is_taken_whole():
    workload = make_workload("w", [arrival(0, (1, 10))])
    sample = take_busiest(workload, 5)
    assert sample.workload is workload
    assert sample.num_warm_up == 0


def test_arrivals_of_a_gamma_process_have_their_rate_and_bursts():
    even = make_arrival_times(5000, 10.0, seed=1)
    bursts = make_arrival_times(5000, 10.0, seed=1, shape=0.2)
    for times, deviation in ((even, 0.1), (bursts, 0.1 * 5**0.5)):
        gaps = [late - early for early, late in pairwise(times)]
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert statistics.stdev(gaps) == pytest.approx(deviation, rel=0.2)


def test_lengths_have_their_means():
    workload = make_plain(4000, 10.0, Lengths(mean_prompt_tokens=300, mean_output_tokens=50), 3)
    assert workload.num_prompt_tokens / 4000 == pytest.approx(300, rel=0.05)
    assert workload.num_output_tokens / 4000 == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("make", [make_plain, make_hot_prefix, make_agent_tree])
def test_a_seed_makes_the_same_workload_again(make):
    assert make(50, 5.0, Lengths(), 4) == make(50, 5.0, Lengths(), 4)
    assert make(50, 5.0, Lengths(), 4) != make(50, 5.0, Lengths(), 5)


def test_hot_prefixes_are_shared_and_the_first_is_the_hottest():
    workload = make_hot_prefix(400, 5.0, Lengths(), 1, num_prefixes=8, prefix_tokens=100)
    counts = [sum(one.pieces[0].content == i for one in workload.arrivals) for i in range(8)]
    assert sum(counts) == 400
    assert counts[0] == max(counts) > 2 * counts[7]


def test_a_turn_of_an_agent_goes_on_from_one_before_it():
    workload: Workload = make_agent_tree(5, 1.0, Lengths(), 2, num_turns=4)
    known = {(Piece(0, 2048),)}
    for one in workload.arrivals:
        assert one.pieces[:-1] in known
        assert one.output_content is not None
        known.add((*one.pieces, Piece(one.output_content, one.num_output_tokens)))
    assert len(workload.arrivals) > 5 * 4
