"""All workers as arrays, one row each: what a choice reads, kept up to date as it changes.

Work that waits for a worker is kept as sums of the terms of the predictor's laws (steps, tokens,
tokens x context), not as seconds: what they cost is a product with the coefficients of the moment,
so load counted before a law was known, or in blocks, needs no conversion.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.request import Incarnation, Role, WorkerId
from router.worker_key import WorkerKey

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NUM_TERMS = 3
_FIRST_CAPACITY = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What does not change in a worker's life."""

    key: WorkerKey
    role: Role
    digest: bytes
    """Of the KV geometry: only workers of one digest are paired."""
    worker_class: str
    """Workers of one class are alike to the predictor."""
    total_blocks: int
    block_size: int
    max_num_seqs: int = 256
    chunk_tokens: int = 8192
    """Most tokens of a prompt in one step."""
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker says of its load, on behalf of all fronts."""

    num_queued: int
    """Prompts that wait or are being computed."""
    queued_tokens: int
    num_running: int
    """Sequences that decode."""
    kv_tokens: int
    """Held by them."""


class Fleet:
    """Rows of workers. Rows are reused; a key names one for as long as its worker is here."""

    def __init__(self, silence_s: float = float("inf")) -> None:
        """Starts empty.

        Args:
            silence_s: a worker not heard for longer is not available.
        """
        self.keys: list[WorkerKey] = []
        """By row; of a row that is not in use, its last worker's."""
        self.version = 0
        """Rises when a worker joins or leaves."""
        self.num_picks = 0
        self._silence_s = silence_s
        self._rows: dict[WorkerKey, int] = {}
        self._rows_by_id: dict[WorkerId, int] = {}
        self._members: dict[int, Member] = {}
        self._groups: dict[bytes, int] = {}
        self._free: list[int] = []
        self._sides: dict[Role, BoolArray] = {}
        self._watchers: list[set[int]] = []
        self._all_heard_until_s = -np.inf
        self._least_room_tokens: float | None = None
        self._allocate(_FIRST_CAPACITY)
        self._add_rows(0)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """Rows, used or not."""
        return len(self.is_available)

    def join(self, member: Member) -> int:
        """Gives a worker a row; it is not available yet."""
        assert member.key not in self._rows
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._clear(row)
        self._rows[member.key] = row
        self.keys[row] = member.key
        self._rows_by_id[member.key.worker_id] = row
        self._members[row] = member
        self.group[row] = self._groups.setdefault(member.digest, len(self._groups))
        self.total_blocks[row] = member.total_blocks
        self.block_size[row] = member.block_size
        self.room_tokens[row] = member.total_blocks * member.block_size
        self.max_num_seqs[row] = member.max_num_seqs
        self.chunk_tokens[row] = member.chunk_tokens
        self.kv_bytes_per_token[row] = member.kv_bytes_per_token
        self.heard_s[row] = 0.0
        self._note_change()
        return row

    def leave(self, key: WorkerKey) -> None:
        """Takes a worker out; one that is not here is no error."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        if self._rows_by_id.get(key.worker_id) == row:
            del self._rows_by_id[key.worker_id]
        del self._members[row]
        self._clear(row)
        self._free.append(row)
        self._note_change()

    def row_of(self, key: WorkerKey) -> int | None:
        """Returns a worker's row; None if it is not here."""
        return self._rows.get(key)

    def row_of_id(self, worker_id: WorkerId) -> int | None:
        """Returns the row of a worker's present life."""
        return self._rows_by_id.get(worker_id)

    def block_size_of(self, key: WorkerKey) -> int:
        """Returns the tokens of a worker's KV block."""
        return self._members[self._rows[key]].block_size

    def watch(self) -> set[int]:
        """Returns where rows are put whose load or availability changes; the caller clears it.

        When workers join or leave, any row may have changed: `version` tells.
        """
        changed: set[int] = set()
        self._watchers.append(changed)
        return changed

    def member_at(self, row: int) -> Member | None:
        """Returns who has a row; None: nobody."""
        return self._members.get(row)

    def are_silent(self, rows: IntArray | slice, now_s: float) -> BoolArray:
        """Says which workers were not heard for too long."""
        are: BoolArray = self.heard_s[rows] < now_s - self._silence_s
        return are

    def silent_before_s(self, now_s: float) -> float:
        """Returns since when a worker must have been heard."""
        return now_s - self._silence_s

    def is_anybody_silent(self, now_s: float) -> bool:
        """Says whether any worker at all was not heard for too long.

        Nobody is heard backwards, so most of the time this takes no look at them.
        """
        if now_s > self._all_heard_until_s:
            self._all_heard_until_s = float(self.heard_s.min()) + self._silence_s
        return now_s > self._all_heard_until_s

    def least_room_tokens(self) -> float:
        """Returns what every worker can hold."""
        if self._least_room_tokens is None:
            self._least_room_tokens = float(self.room_tokens.min())
        return self._least_room_tokens

    def members(self) -> Iterable[tuple[int, Member]]:
        """Returns all rows in use."""
        return self._members.items()

    @property
    def num_groups(self) -> int:
        """Geometries that workers have, or had."""
        return len(self._groups)

    def set_available(self, key: WorkerKey, *, is_available: bool) -> None:
        """Notes whether new work may go to a worker; one that is not here is no error."""
        row = self._rows.get(key)
        if row is not None:
            self.is_available[row] = is_available
            self._note_row(row)

    def hear(self, key: WorkerKey, now_s: float) -> None:
        """Notes that a worker's stream spoke."""
        row = self._rows.get(key)
        if row is not None:
            self.heard_s[row] = now_s

    def usable(self, role: Role, excluded: Iterable[WorkerKey], now_s: float) -> BoolArray:
        """Says of each row whether a worker of a pool is there that takes new work."""
        is_usable = self.heard_s >= now_s - self._silence_s
        is_usable &= self.is_available
        is_usable &= self.side(role)
        for key in excluded:
            row = self._rows.get(key)
            if row is not None:
                is_usable[row] = False
        return is_usable

    def take_report(self, key: WorkerKey, report: Report) -> None:
        """Takes a worker's own figures; what is beyond this front's charges is others' load.

        The figures are as old as a heartbeat. So the most that this front had there since the last
        report but one is its own: what it has just finished must not look like another's. Requests
        are told apart by number, as a front only guesses how many tokens of each are uncached.
        """
        row = self._rows.get(key)
        if row is None:
            return
        own = np.maximum(self._peaks[:, row], self._last_peaks[:, row])
        queued = max(report.num_queued - own[0], 0.0)
        running = max(report.num_running - own[1], 0.0)
        tokens = report.queued_tokens * queued / max(report.num_queued, 1)
        kv_tokens = report.kv_tokens * running / max(report.num_running, 1)
        self._reported[:, row] = queued, tokens, 0.0, running, kv_tokens
        self._note_others(row)
        self._last_peaks[:, row] = self._peaks[:, row]
        self._peaks[:, row] = self._own(row)

    def set_shared(self, worker_id: WorkerId, terms: FloatArray, seqs: float, kv: float) -> None:
        """Takes what all other fronts say that they have at a worker, as of a moment ago."""
        row = self._rows_by_id.get(worker_id)
        if row is not None:
            self._shared[:, row] = (*terms, seqs, kv)
            self._note_others(row)

    def clear_shared(self) -> None:
        """Forgets it: nobody says anything any more, or all is said anew."""
        self._shared[:] = 0.0
        self._note_others(slice(None))

    def note_pick(self, row: int) -> None:
        """Notes that a worker was chosen."""
        self.num_picks += 1
        self.last_pick[row] = self.num_picks
        self._note_row(row)

    def note_load(self, row: int) -> None:
        """Notes that this front's load at a worker has changed."""
        peaks = self._peaks
        for number, own in enumerate(self._own(row)):
            if own > peaks[number, row]:
                peaks[number, row] = own
        self._note_row(row)

    def add_prompt(self, row: int, terms: tuple[float, float, float], sign: int = 1) -> None:
        """Adds a prompt to what this front has in a worker's queue, or takes it away."""
        for number, term in enumerate(terms):
            self.queue[number, row] += sign * term
        self._note_row(row)

    def set_step(
        self,
        row: int,
        head: tuple[float, float, float],
        done: tuple[float, float, float],
        since_s: float,
    ) -> None:
        """Notes what of this front's prompts is being computed, and what is computed already."""
        for number in range(NUM_TERMS):
            self.head[number, row] = head[number]
            self.done[number, row] = done[number]
        self.head_since_s[row] = since_s
        self._note_row(row)

    def add_sequences(self, row: int, num_seqs: int, kv_tokens: float, blocks: int) -> None:
        """Adds sequences to what this front has in a worker's batch; negative ones go."""
        self.num_seqs[row] += num_seqs
        self.kv_tokens[row] += kv_tokens
        self.blocks[row] += blocks
        self._note_row(row)

    def add_to_link(self, row: int, transfer_s: float, now_s: float) -> None:
        """Adds a hand-off to what a worker's link has to move."""
        self.link_until_s[row] = max(self.link_until_s[row], now_s) + transfer_s
        self._note_row(row)

    def _note_row(self, row: int) -> None:
        for changed in self._watchers:
            changed.add(row)

    def _own(self, row: int) -> tuple[float, float]:
        """Returns this front's prompts in the queue, and its sequences."""
        return self.queue[0, row], self.num_seqs[row]

    def _note_others(self, row: int | slice) -> None:
        """Believes the larger of what the worker and what the other fronts say."""
        others = np.maximum(self._reported[:, row], self._shared[:, row])
        self.others_queue[:, row] = others[:NUM_TERMS]
        self.others_seqs[row], self.others_kv_tokens[row] = others[NUM_TERMS:]
        rows = self._members if isinstance(row, slice) else (row,)
        for changed in self._watchers:
            changed.update(rows)

    def side(self, role: Role) -> BoolArray:
        """Says of each row whether a worker of a pool has it."""
        side = self._sides.get(role)
        if side is None:
            rows = [row for row, member in self._members.items() if member.role is role]
            side = self._sides[role] = np.zeros(self.capacity, dtype=np.bool_)
            side[rows] = True
        return side

    def _note_change(self) -> None:
        self.version += 1
        self._sides.clear()
        self._all_heard_until_s, self._least_room_tokens = -np.inf, None

    def _allocate(self, capacity: int) -> None:
        def zeros() -> FloatArray:
            return np.zeros(capacity)

        def terms() -> FloatArray:
            return np.zeros((NUM_TERMS, capacity))

        self.is_available: BoolArray = np.zeros(capacity, dtype=np.bool_)
        self.heard_s = zeros()
        self.group: IntArray = np.zeros(capacity, dtype=np.int64)
        self.total_blocks, self.block_size, self.max_num_seqs = zeros(), zeros(), zeros()
        self.room_tokens = zeros()
        """That all blocks hold."""
        self.chunk_tokens, self.kv_bytes_per_token = zeros(), zeros()
        self.queue = terms()
        """Of prompts that this front sent and that are not computed."""
        self.head = terms()
        """Of those that the worker's present step computes; its first term counts chunks."""
        self.done = terms()
        """Of the first prompt: what earlier steps computed."""
        self.head_since_s = zeros()
        self.num_seqs, self.kv_tokens, self.blocks = zeros(), zeros(), zeros()
        """Of sequences that this front sent to decode: how many, the tokens they will probably
        hold, and the blocks that they may grow to."""
        self.link_until_s = zeros()
        """When a worker's link will have moved the hand-offs that were planned, in a row."""
        self.last_pick = zeros()
        self.others_queue = terms()
        """Of other fronts' prompts."""
        self.others_seqs, self.others_kv_tokens = zeros(), zeros()
        self._reported: FloatArray = np.zeros((NUM_TERMS + 2, capacity))
        self._shared: FloatArray = np.zeros((NUM_TERMS + 2, capacity))
        self._peaks: FloatArray = np.zeros((2, capacity))
        self._last_peaks: FloatArray = np.zeros((2, capacity))

    def _arrays(self) -> list[npt.NDArray[np.generic]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _grow(self) -> None:
        old, size = self._arrays(), self.capacity
        self._allocate(2 * size)
        for before, after in zip(old, self._arrays(), strict=True):
            after[..., :size] = before
        self._add_rows(size)

    def _add_rows(self, first: int) -> None:
        rows = range(first, self.capacity)
        self._free.extend(reversed(rows))
        self.keys += [WorkerKey(WorkerId(""), Incarnation(0))] * len(rows)
        self.room_tokens[first:] = self.max_num_seqs[first:] = self.heard_s[first:] = np.inf

    def _clear(self, row: int) -> None:
        for array in self._arrays():
            array[..., row] = 0
        self.room_tokens[row] = self.max_num_seqs[row] = self.heard_s[row] = np.inf
