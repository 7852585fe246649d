"""A fleet under a load that comes and goes, for tests of choices."""

import itertools
from random import Random

import numpy as np

from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation, RequestId, Role, WorkerId
from pdserve.timeline import ManualClock
from router.cost import LawTable, prefill_terms
from router.demand import Demand
from router.fleet import Fleet, Member, Report
from router.load_book import DecodeCharge, LoadBook
from router.policy import Choice, JointPolicy
from router.worker_key import WorkerKey

FAST = Profile(
    worker_class="fast",
    prefill=(0.004, 2e-5, 1e-9),
    decode=(0.004, 2e-4, 3e-8),
    transfer=(0.002, 2e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=40_000,
)
SLOW = Profile(
    worker_class="slow",
    prefill=(0.008, 5e-5, 2e-9),
    decode=(0.009, 3e-4, 6e-8),
    transfer=(0.003, 4e-11),
    kv_bytes_per_token=100_000,
    kv_tokens=40_000,
)


class FleetScene:
    """A fleet under a load that comes and goes."""

    def __init__(self, seed: int, num_workers: int, profiles: tuple[Profile, ...]) -> None:
        self.random = Random(seed)
        self.clock = ManualClock()
        self.fleet = Fleet(silence_s=3.0)
        self.book = LoadBook(self.fleet, self.clock)
        self.table = LawTable(self.fleet, Predictor(profiles))
        self.policy = JointPolicy(self.fleet, self.table)
        self.names = itertools.count()
        self.alive: list[RequestId] = []
        for number in range(num_workers):
            role = Role.PREFILL if number % 2 else Role.DECODE
            key = WorkerKey(WorkerId(f"{role}-{number}"), Incarnation(1))
            profile = profiles[number // 2 % len(profiles)]
            member = Member(
                key=key,
                role=role,
                digest=b"one",
                worker_class=profile.worker_class,
                total_blocks=profile.kv_tokens // 16,
                block_size=16,
                max_num_seqs=12,
                chunk_tokens=2048,
                kv_bytes_per_token=profile.kv_bytes_per_token,
            )
            self.fleet.join(member)
            self.fleet.set_available(key, is_available=True)

    def load(self, max_num_seqs: int) -> None:
        """Gives each worker some work, most of them different amounts of it."""
        for _, member in tuple(self.fleet.members()):
            for _ in range(self.random.randrange(max_num_seqs + 1)):
                name = RequestId(str(next(self.names)))
                if member.role is Role.PREFILL:
                    terms = prefill_terms(self.random.choice((100, 1500)), 0)
                    self.book.charge_prefill(name, member.key, terms)
                else:
                    charge = DecodeCharge(num_seqs=1, kv_tokens=3000.0, blocks=200)
                    self.book.charge_decode(name, member.key, charge)
                self.alive.append(name)

    def demand(self) -> Demand:
        rows = self.random.sample(range(len(self.fleet)), len(self.fleet) // 4)
        return Demand(
            num_tokens=self.random.choice((200, 3000, 9000)),
            num_growth_tokens=100,
            num_expected_tokens=80,
            cached_rows=np.array(sorted(rows)),
            cached_tokens=np.array([128 * self.random.randrange(1, 40) for _ in rows]),
            max_local_tokens=self.random.choice((0, 400)),
            tpot_slo_s=self.random.choice((None, 0.007)),
            ttft_slo_s=self.random.choice((None, 0.3)),
        )

    def live(self, choice: Choice, demand: Demand) -> None:
        """Charges a choice, lets others end, and lets time pass."""
        name = RequestId(str(next(self.names)))
        uncached = max(demand.num_tokens - choice.cached_tokens, 1)
        terms = prefill_terms(uncached, choice.cached_tokens)
        self.book.charge_prefill(name, choice.prefill or choice.decode, terms)
        charge = DecodeCharge(num_seqs=1, kv_tokens=demand.num_tokens + 40, blocks=9)
        self.book.charge_decode(name, choice.decode, charge)
        for key in (choice.prefill, choice.decode):
            if key is not None:
                self.book.charge_link(key, choice.transfer_s)
        self.alive.append(name)
        if self.random.random() < 0.7:
            done = self.alive.pop(self.random.randrange(len(self.alive)))
            self.book.keep_only(done, ())
        self.pass_time()

    def pass_time(self) -> None:
        """Lets some workers say something, come or go."""
        self.clock.advance(self.random.choice((0.001, 0.05)))
        for row, member in self.fleet.members():
            if self.random.random() < 0.95:
                self.fleet.heard_s[row] = self.clock.now()
            if self.random.random() < 0.02:
                report = Report(num_queued=3, queued_tokens=900, num_running=2, kv_tokens=500)
                self.fleet.take_report(member.key, report)
            if self.random.random() < 0.02:
                is_available = self.random.random() < 0.8
                self.fleet.set_available(member.key, is_available=is_available)
