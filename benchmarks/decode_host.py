"""What a decode step costs the host: planning it and booking its tokens, with nothing computed.

    python -m benchmarks.decode_host

A step on a device is launched while the one before runs, so this time is hidden for as long as it
is shorter than a step; at one sequence it is a part of the time to the second token. CPU time of
one thread, so that neighbours on the machine count little.
"""

import argparse
import statistics
import time

from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.request import Request, RequestId, SampledToken, SamplingParams
from pdserve.timeline import MonotonicClock

BLOCK_SIZE = 16


def make_scheduler(num_sequences: int, num_prompt_tokens: int, num_steps: int) -> DecodeScheduler:
    """Returns a scheduler on which as many sequences run."""
    blocks_each = -(-(num_prompt_tokens + num_steps) // BLOCK_SIZE) + 2
    config = EngineConfig(model="none", block_size=BLOCK_SIZE, max_num_seqs=256)
    scheduler = DecodeScheduler(
        config,
        num_sequences * blocks_each,
        "revision",
        MonotonicClock(),
        max_waiting=1,
        max_local_prefill_tokens=None,
    )
    for index in range(num_sequences):
        request = Request(
            request_id=RequestId(f"request-{index}"),
            token_ids=tuple((index * 7919 + i) % 50_000 for i in range(num_prompt_tokens)),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=num_steps + 2, ignore_eos=True),
        )
        scheduler.reserve(request)
        scheduler.start(request.request_id, 1, {0: 7})
    return scheduler


def invent_result(plan: StepPlan) -> StepResult:
    """Returns some token for each slice."""
    return StepResult(
        sampled={
            part.request.request_id: SampledToken(token_id=part.end % 1000) for part in plan.slices
        }
    )


def time_steps(num_sequences: int, num_steps: int, num_in_flight: int) -> tuple[float, float]:
    """Returns the seconds of planning and of booking one step, medians."""
    scheduler = make_scheduler(num_sequences, 2000, num_steps)
    plan_s: list[float] = []
    complete_s: list[float] = []
    flying: list[StepPlan] = []
    for _ in range(num_steps):
        started_s = time.thread_time()
        plan = scheduler.plan_step()
        plan_s.append(time.thread_time() - started_s)
        assert plan is not None
        assert len(plan.slices) == num_sequences
        flying.append(plan)
        if len(flying) < num_in_flight:
            continue
        oldest = flying.pop(0)
        result = invent_result(oldest)
        started_s = time.thread_time()
        progress = scheduler.complete_step(oldest, result)
        complete_s.append(time.thread_time() - started_s)
        assert len(progress) == num_sequences
    return statistics.mean(plan_s), statistics.mean(complete_s)


def main() -> None:
    """Prints a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=2, choices=(1, 2))
    arguments = parser.parse_args()
    for num_sequences in (1, 8, 64, 256):
        plan_s, complete_s = time_steps(num_sequences, arguments.steps, arguments.in_flight)
        print(
            f"{num_sequences:4d} sequences: plan {plan_s * 1e6:8.1f} us, "
            f"complete {complete_s * 1e6:8.1f} us, both {(plan_s + complete_s) * 1e6:8.1f} us"
        )


if __name__ == "__main__":
    main()
