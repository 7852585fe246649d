"""How long one choice of workers takes, by the size of the fleet.

    python -m benchmarks.routing_choice --output benchmarks/results/routing_choice.json

A synthetic fleet under load, its predictor fitted, an eighth of all workers holding some of the
prompt's prefix. Timed are the choice and its charge, with the garbage collector set as in a router;
not the look-up in the prefix index, which has a benchmark of its own. Old requests are released.

The same choices are made several times over: `p99_us` is of all, as they came, `calm_p99_us` of the
least time of each one, which what else the machine does has not touched.
"""

import argparse
import gc
import json
import os
import platform
import random
import time
from collections import deque
from pathlib import Path

import numpy as np

from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.cost import LawTable, prefill_terms
from router.demand import Demand
from router.fleet import Fleet, Member
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, JointPolicy
from router.run_settings import GC_THRESHOLDS
from router.worker_key import WorkerKey

PROFILE = Profile(
    worker_class="bench",
    prefill=(0.004, 2.4e-5, 1.2e-9),
    decode=(0.006, 2.0e-5, 4.0e-8),
    transfer=(0.002, 2.5e-11),
    kv_bytes_per_token=131_072,
    kv_tokens=480_000,
)


NUM_ROUNDS = 6


class Scene:
    """A fleet, half prefill and half decode, that requests come to and leave."""

    def __init__(self, num_workers: int, *, is_fitted: bool) -> None:
        self.random = random.Random(7)
        self.clock = ManualClock()
        self.fleet = Fleet(silence_s=3.0)
        for number in range(num_workers):
            key = WorkerKey(WorkerId(f"w{number:04}"), Incarnation(1))
            member = Member(
                key=key,
                role=Role.PREFILL if number % 2 else Role.DECODE,
                digest=b"one",
                worker_class=PROFILE.worker_class,
                total_blocks=30_000,
                block_size=16,
                kv_bytes_per_token=PROFILE.kv_bytes_per_token,
            )
            self.fleet.join(member)
            self.fleet.set_available(key, is_available=True)
        self.book = LoadBook(self.fleet, self.clock)
        table = LawTable(self.fleet, Predictor([PROFILE] if is_fitted else []))
        self.policy = JointPolicy(self.fleet, table)
        self.requests: deque[RequestId] = deque()

    def demand(self) -> Demand:
        count = self.fleet.capacity // 8
        rows = np.array(self.random.sample(range(len(self.fleet)), min(count, len(self.fleet))))
        return Demand(
            num_tokens=self.random.choice((500, 2_000, 8_000, 60_000)),
            num_growth_tokens=1024,
            num_expected_tokens=256,
            cached_rows=rows,
            cached_tokens=128 * np.arange(1, len(rows) + 1),
            max_local_tokens=512,
            tpot_slo_s=0.05,
        )

    def step(self, number: int, demand: Demand) -> Choice:
        """Chooses, and charges what was chosen."""
        choice = self.policy.choose(demand, self.clock.now())
        name = RequestId(str(number))
        uncached = max(demand.num_tokens - choice.cached_tokens, 1)
        terms = prefill_terms(uncached, choice.cached_tokens)
        self.book.charge_prefill(name, choice.prefill or choice.decode, terms)
        part = DecodeCharge(num_seqs=1, kv_tokens=demand.num_tokens + 128, blocks=500)
        self.book.charge_decode(name, choice.decode, part)
        self.requests.append(name)
        return choice

    def release(self) -> None:
        """Ends the oldest request once there are four for each worker."""
        if len(self.requests) > 4 * len(self.fleet):
            self.book.keep_only(self.requests.popleft(), ())


def time_choices(num_workers: int, num_choices: int, *, is_fitted: bool) -> list[float]:
    """Returns what each choice takes, in microseconds of this thread."""
    scene = Scene(num_workers, is_fitted=is_fitted)
    took_us = []
    for number in range(num_choices):
        scene.clock.advance(0.0005)
        scene.fleet.heard_s[:] = scene.clock.now()
        demand = scene.demand()
        started = time.thread_time()
        scene.step(number, demand)
        took_us.append(1e6 * (time.thread_time() - started))
        scene.release()
    return took_us


def measure(num_workers: int, num_choices: int, *, is_fitted: bool) -> dict[str, object]:
    """Returns percentiles of a choice, in microseconds."""
    rounds = [
        time_choices(num_workers, num_choices, is_fitted=is_fitted) for _ in range(NUM_ROUNDS)
    ]
    took_us = np.array(rounds)[:, num_choices // 10 :]
    p50, p99 = np.percentile(took_us, (50, 99))
    calm_p50, calm_p99 = np.percentile(took_us.min(axis=0), (50, 99))
    return {
        "num_workers": num_workers,
        "is_fitted": is_fitted,
        "num_choices": num_choices,
        "num_rounds": NUM_ROUNDS,
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "calm_p50_us": round(float(calm_p50), 1),
        "calm_p99_us": round(float(calm_p99), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--choices", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    rows = [
        measure(num_workers, arguments.choices, is_fitted=is_fitted)
        for num_workers in arguments.workers
        for is_fitted in (True, False)
    ]
    report = {
        "machine": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
        "choices": rows,
    }
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
