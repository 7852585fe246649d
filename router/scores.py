"""What each worker costs apart from any request, kept by row and changed where its load changes.

    columns   arrays over all rows: what the best few of a thousand workers are found with
    standing  plain numbers of one worker: what the best few are compared by, pair by pair

A request adds to the columns what its tokens cost, by kind of worker, and corrects those that have
some of its prompt cached. That leaves out waits for room and times per token that are missed, which
only add to it: as long as none of the best few has any of that, they are the best few.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from pdserve.request import Role
from router.cost import Laws, LawTable, prefill_cost
from router.fleet import Fleet, FloatArray, IntArray
from router.worker_key import WorkerKey

_TIE = 1e-11
"""For each pick that a worker's last one is later: who was picked longest ago wins a tie."""
_TIE_PICKS = 1 << 16
"""Who was picked before these is as good as never picked."""
_MANY = 64
"""Rows; if more have changed, all are reckoned anew."""

Cached = tuple[IntArray, FloatArray]
"""Rows that have some of a prompt, and how many tokens of it."""


@dataclass(slots=True)
class Ask:
    """What a request wants to know of each worker. Not frozen: that takes longer to make."""

    now_s: float
    is_fitted: bool
    """Costs are seconds; else KV blocks."""
    crowding: float
    """What others lose for each unit that its prompt costs, see `Scores.crowding`."""
    num_tokens: int
    num_samples: int
    kv_tokens: float
    """That it will hold on decode."""
    life_tokens: float
    """Of output, that probably come."""
    tpot_slo_s: float
    ttft_slo_s: float
    """Both are infinite if nothing is wanted."""


@dataclass(slots=True)
class Standing:
    """One worker as it stands now, in seconds or KV blocks; nobody changes it."""

    row: int
    prefill: tuple[float, float, float]
    """Its law."""
    knows_prefill: bool
    rest: float
    """Of the queue: what waits behind the step that is being computed."""
    until_s: float
    """When the queue as it is will be computed."""
    chunk_tokens: float
    step: float
    """Of decoding."""
    per_sequence: float
    """What one more adds to it."""
    per_kv_token: float
    seqs: float
    kv_tokens: float
    """Held by those that decode."""
    room_seqs: float
    room_tokens: float
    """That all blocks hold."""
    transfer_fixed: float
    transfer_per_byte: float
    kv_bytes_per_token: float
    link_until_s: float
    tie: float

    def queue(self, now_s: float) -> float:
        """Returns how long a prompt waits for those before it; what has passed is over."""
        left = self.until_s - now_s
        return left if left > self.rest else self.rest

    def without_prompts(self, now_s: float) -> "Standing":
        """Returns it as it is for a prompt that it has computed already."""
        nothing = (0.0, 0.0, 0.0)
        return replace(self, prefill=nothing, rest=0.0, until_s=now_s, chunk_tokens=math.inf)

    def share_to_free(self, num_seqs: float, num_tokens: float) -> float:
        """Returns which part of its load must end before it has room for more to decode."""
        missing_seqs = self.seqs + num_seqs - self.room_seqs
        missing_tokens = self.kv_tokens + num_tokens - self.room_tokens
        if missing_seqs <= 0 and missing_tokens <= 0:
            return 0.0
        share = max(missing_seqs / max(self.seqs, 1.0), missing_tokens / max(self.kv_tokens, 1.0))
        return min(share, 1.0)


class Scores:
    """Columns and standings of a fleet."""

    def __init__(self, fleet: Fleet, table: LawTable) -> None:
        """Reads both, from `refresh` on."""
        self._fleet = fleet
        self._table = table
        self._changed = fleet.watch()
        self._standings: dict[int, Standing] = {}
        self._laws: Laws | None = None
        self._base_pick = 0
        self.keys: tuple[WorkerKey, ...] = ()
        """By row."""
        self.rest: FloatArray
        self.until_s: FloatArray
        self.step: FloatArray
        self.bias: dict[Role, FloatArray]
        """Infinite for who takes no new work of a pool; else next to nothing, by the last pick."""
        self._costs: FloatArray
        """Of all prompts in a queue."""
        self._counts: FloatArray
        self._total_cost = self._num_prompts = 0.0

    def refresh(self, now_s: float) -> Laws:
        """Brings all up to date, and returns the laws that it is made of."""
        laws = self._table.laws(now_s)
        changed = self._changed
        if laws is not self._laws or len(changed) > _MANY:
            self._laws = laws
            self._score_all(laws)
        else:
            for row in changed:
                self._score(row, laws)
        changed.clear()
        return laws

    def standing(self, row: int) -> Standing:
        """Returns a worker's numbers, as of the last refresh."""
        found = self._standings.get(row)
        if found is None:
            assert self._laws is not None
            found = self._standings[row] = self._stand(row, self._laws)
        return found

    def queue(self, now_s: float) -> FloatArray:
        """Returns how long a prompt waits at each worker for those before it."""
        queue: FloatArray = np.maximum(self.rest, self.until_s - now_s)
        return queue

    def crowding(self, queue: FloatArray, role: Role) -> float:
        """Returns how many prompts are delayed by one more, on average, in the pool that computes.

        While any worker is idle, nobody need wait for work that is elsewhere. While all are busy,
        all work is work that everybody waits for: until the shortest queue is empty, a busy worker
        gets one prompt for each that it computes, and those in the queues are such ones.
        """
        if self._num_prompts < 0.5 or self._total_cost <= 0:
            return 0.0
        shortest = float((queue + self.bias[role]).min())
        return shortest * self._num_prompts / self._total_cost if shortest < np.inf else 0.0

    def prompt_bound(self, laws: Laws, ask: Ask, cached: Cached, queue: FloatArray) -> FloatArray:
        """Returns queue and prompt, and what the prompt costs others, for all rows."""
        rows, tokens = cached
        weight = 1.0 + ask.crowding
        times = [prefill_cost(kind.prefill, float(ask.num_tokens), 0.0) for kind in laws.kinds]
        own: FloatArray = queue + laws.spread([weight * time for time in times])
        if len(rows):
            law = laws.kinds[1].prefill if laws.is_uniform else laws.prefill_of(rows)
            cost = prefill_cost(law, np.maximum(ask.num_tokens - tokens, 1.0), tokens)
            own[rows] = queue[rows] + weight * cost
        return own

    def decode_bound(self, laws: Laws, ask: Ask, cached: Cached) -> FloatArray:
        """Returns all steps until the last token, and the hand-off, for all rows."""
        rows, tokens = cached
        # Without the predictor, blocks that are cached are not to be filled.
        added = ask.kv_tokens if laws.is_fitted else float(ask.num_tokens)
        own = self.step_with(laws, ask.num_samples, added)
        if laws.is_fitted:
            if ask.life_tokens > 1:
                own *= ask.life_tokens
            own += laws.spread([kind.handoff * ask.num_tokens for kind in laws.kinds])
        if len(rows):
            saved = [kind.handoff if laws.is_fitted else kind.decode[2] for kind in laws.kinds]
            own[rows] -= laws.spread(saved, rows) * tokens
        return own

    def step_with(self, laws: Laws, num_seqs: float, num_tokens: float) -> FloatArray:
        """Returns a step of decoding with so many sequences and tokens more, for all rows."""
        more = [kind.decode[1] * num_seqs + kind.decode[2] * num_tokens for kind in laws.kinds]
        step: FloatArray = self.step + laws.spread(more)
        return step

    def _score(self, row: int, laws: Laws) -> None:
        one = self._standings[row] = self._stand(row, laws)
        self.rest[row], self.until_s[row], self.step[row] = one.rest, one.until_s, one.step
        fleet = self._fleet
        member = fleet.member_at(row)
        if member is not None:
            self.bias[member.role][row] = one.tie if fleet.is_available[row] else np.inf

    def _stand(self, row: int, laws: Laws) -> Standing:
        fleet = self._fleet
        kind = laws.kinds[laws.kind_of.item(row)]
        count, tokens, pairs = self._prompts(row)
        p0, p1, p2 = kind.prefill
        seqs, kv_tokens = fleet.num_seqs.item(row) + fleet.others_seqs.item(row), 0.0
        if laws.is_fitted:
            head, done, chunk = fleet.head.item, fleet.done.item, fleet.chunk_tokens.item(row)
            tokens -= head(1, row) + done(1, row)
            pairs -= head(2, row) + done(2, row)
            # A step that is not full is shared with the prompt that comes next.
            rest = max(p0 * (tokens // chunk) + p1 * tokens + p2 * pairs, 0.0)
            cost = rest + p0 * head(0, row) + p1 * head(1, row) + p2 * head(2, row)
            until_s = cost + fleet.head_since_s.item(row)
            kv_tokens = fleet.kv_tokens.item(row)
        else:
            rest = cost = p0 * count + p1 * tokens + p2 * pairs
            until_s = -np.inf
            # What sequences may grow to stands for the work that they still are.
            kv_tokens = fleet.blocks.item(row) * fleet.block_size.item(row)
        self._note_queue(row, cost, count)
        kv_tokens += fleet.others_kv_tokens.item(row)
        fixed, per_sequence, per_kv_token = kind.decode
        return Standing(
            row,
            kind.prefill,
            kind.knows_prefill,
            rest,
            until_s,
            fleet.chunk_tokens.item(row),
            fixed + per_sequence * seqs + per_kv_token * kv_tokens,
            per_sequence,
            per_kv_token,
            seqs,
            kv_tokens,
            fleet.max_num_seqs.item(row),
            fleet.room_tokens.item(row),
            kind.transfer[0],
            kind.transfer[1],
            fleet.kv_bytes_per_token.item(row),
            fleet.link_until_s.item(row),
            _TIE * max(fleet.last_pick.item(row) - self._base_pick, 0),
        )

    def _prompts(self, row: int) -> tuple[float, float, float]:
        """Returns the terms of all prompts in a queue."""
        mine, others = self._fleet.queue.item, self._fleet.others_queue.item
        return (
            mine(0, row) + others(0, row),
            mine(1, row) + others(1, row),
            mine(2, row) + others(2, row),
        )

    def _note_queue(self, row: int, cost: float, count: float) -> None:
        before = self._counts.item(row)
        self._total_cost += cost - self._costs.item(row)
        self._num_prompts += count - before
        self._costs[row], self._counts[row] = cost, count

    def _score_all(self, laws: Laws) -> None:
        fleet = self._fleet
        self._standings.clear()
        self.keys = tuple(fleet.keys)
        self._base_pick = max(fleet.num_picks - _TIE_PICKS, 0)
        prefill, decode = laws.prefill[:, laws.kind_of], laws.decode[:, laws.kind_of]
        queue = fleet.queue + fleet.others_queue
        self._counts = queue[0].copy()
        if laws.is_fitted:
            left = queue - fleet.head - fleet.done
            left[0] = left[1] // np.maximum(fleet.chunk_tokens, 1.0)
            self.rest = np.maximum((prefill * left).sum(axis=0), 0.0)
            self._costs = self.rest + (prefill * fleet.head).sum(axis=0)
            self.until_s = self._costs + fleet.head_since_s
        else:
            self.rest = (prefill * queue).sum(axis=0)
            self._costs = self.rest.copy()
            self.until_s = np.full(fleet.capacity, -np.inf)
        self._total_cost, self._num_prompts = float(self._costs.sum()), float(self._counts.sum())
        seqs, kv_tokens = decode_load(fleet, laws)
        self.step = decode[0] + decode[1] * seqs + decode[2] * kv_tokens
        tie = _TIE * np.maximum(fleet.last_pick - self._base_pick, 0.0)
        self.bias = {
            role: np.where(fleet.is_available & fleet.side(role), tie, np.inf) for role in Role
        }


def decode_load(fleet: Fleet, laws: Laws) -> tuple[FloatArray, FloatArray]:
    """Returns the sequences that decode, and the tokens that they hold."""
    seqs = fleet.num_seqs + fleet.others_seqs
    if laws.is_fitted:
        return seqs, fleet.kv_tokens + fleet.others_kv_tokens
    return seqs, fleet.blocks * fleet.block_size + fleet.others_kv_tokens
