"""The best few who may decode, of a thousand: by bounds as long as these say enough.

bounds say it    none of the best eight by bound waits for room or misses a time per token
bounds suffice   few have a bound below the worst cost of those eight: these are looked at
full look        the cost of everybody
"""

import math
from dataclasses import dataclass

import numpy as np

from pdserve.errors import NoWorker, TooLong
from router.cost import Laws, share_to_free
from router.demand import Demand
from router.fleet import Fleet, FloatArray, IntArray
from router.scores import Ask, Cached, Scores, decode_load
from router.ways import MISSED_WEIGHT, SHORT_LIST, Receiver, make_receiver, shorten

_FEW = 24
"""So many are looked at by plain numbers; for more of them, arrays are quicker."""


@dataclass(slots=True)
class Look:
    """One choice to be made. Not frozen: that takes longer to make."""

    ask: Ask
    demand: Demand
    laws: Laws
    queue: FloatArray
    found: Cached
    cached: FloatArray
    """The tokens of the prompt that each row has."""
    excluded: list[int]
    full: tuple[FloatArray, FloatArray] | None = None
    """Bounds that all costs were found for, and those."""

    @property
    def max_tokens(self) -> int:
        """That it may come to hold; workers hold whole blocks, so tokens can be compared."""
        return self.demand.num_tokens + self.demand.num_growth_tokens


class DecodeSearch:
    """Finds those who may decode."""

    def __init__(self, fleet: Fleet, scores: Scores) -> None:
        """Reads both; scores are fresh when it is asked."""
        self._fleet = fleet
        self._scores = scores

    def find(
        self,
        look: Look,
        own: FloatArray,
        among: IntArray | None = None,
        size: int = SHORT_LIST,
    ) -> list[Receiver]:
        """Returns the best few, by the bound if that says all of them, else by all that counts.

        Args:
            look: the choice.
            own: bounds of all workers.
            among: looks at these alone.
            size: how many are few.

        Raises:
            NoWorker: there is nobody at all.
            TooLong: nobody can ever hold the request.
        """
        rows = _best_rows(own, among, size)
        found = self._receivers_at(look, rows)
        if found and self._are_all_able(look, rows):
            if not [one for one in found if one.wait or one.missed]:
                return found
            better = self._better(look, (own, among), rows, found)
            if better is not None:
                return better
        rows = _best_rows(self._full_cost(look, own), among, size)
        return self._receivers_at(look, rows)

    def _are_all_able(self, look: Look, rows: IntArray) -> bool:
        fleet = self._fleet
        is_room = look.max_tokens <= fleet.least_room_tokens() and look.demand.num_samples == 1
        if is_room and not fleet.is_anybody_silent(look.ask.now_s):
            return True
        return len(self._able(look, rows)) == len(rows)

    def _able(self, look: Look, rows: IntArray) -> list[int]:
        """Returns those of a few that can ever hold the request, and that were heard of."""
        fleet = self._fleet
        needs = _needed_tokens(look, fleet.block_size[rows]).tolist()
        room, heard_s = fleet.room_tokens.item, fleet.heard_s.item
        limit_s = fleet.silent_before_s(look.ask.now_s)
        return [
            row
            for row, need in zip(rows.tolist(), needs, strict=True)
            if room(row) >= need and heard_s(row) >= limit_s
        ]

    def _better(
        self,
        look: Look,
        costs: tuple[FloatArray, IntArray | None],
        rows: IntArray,
        found: list[Receiver],
    ) -> list[Receiver] | None:
        """Returns the best few if few can be better than those found; None: too many could.

        Nobody costs less than its bound says, so only those count whose bound is below the worst
        cost of those found.
        """
        own, among = costs
        worst = max(map(_full_cost_of, own[rows].tolist(), found))
        bounds = own if among is None else own[among]
        near = (bounds <= worst).nonzero()[0]
        if len(near) > _FEW:
            return None
        if len(near) <= len(found):
            return found
        places = near if among is None else among[near]
        able = np.array(self._able(look, places))
        others = self._receivers_at(look, able)
        full = np.array(list(map(_full_cost_of, own[able].tolist(), others)))
        return [others[place] for place in shorten(full, len(found)).tolist()]

    def _receivers_at(self, look: Look, rows: IntArray) -> list[Receiver]:
        ask, standing = look.ask, self._scores.standing
        places = zip(rows.tolist(), look.cached[rows].tolist(), strict=True)
        return [make_receiver(ask, standing(row), cached) for row, cached in places]

    def _full_cost(self, look: Look, own: FloatArray) -> FloatArray:
        """Returns all costs, with what bounds leave out; raises as `find`."""
        if look.full is not None and look.full[0] is own:
            return look.full[1]
        fleet, ask, laws = self._fleet, look.ask, look.laws
        full = np.where(fleet.are_silent(slice(None), ask.now_s), np.inf, own)
        if full.min() == np.inf:
            raise NoWorker("no decode worker is available")
        fits = fleet.room_tokens >= _needed_tokens(look, fleet.block_size)
        if not fits.all():
            usable = np.flatnonzero(full < np.inf)
            if not fits[usable].any():
                raise _too_long(fleet, usable, look)
            full[~fits] = np.inf
        if laws.is_fitted:
            need = ask.num_samples, ask.kv_tokens
            step = self._scores.step_with(laws, *need)
            room = fleet.max_num_seqs, fleet.room_tokens
            share = share_to_free(decode_load(fleet, laws), need, room)
            if share is not None:
                full += step * max(ask.life_tokens, 1.0) * share
            if ask.tpot_slo_s < math.inf:
                full += MISSED_WEIGHT * np.maximum(step - ask.tpot_slo_s, 0.0)
        look.full = own, full
        return full


def _full_cost_of(bound: float, one: Receiver) -> float:
    return bound + one.wait + MISSED_WEIGHT * one.missed


def _best_rows(own: FloatArray, among: IntArray | None, size: int) -> IntArray:
    return shorten(own, size) if among is None else among[shorten(own[among], size)]


def _needed_tokens(look: Look, block_size: FloatArray) -> FloatArray:
    """Returns the room that a request must find, in the order of workers with such blocks.

    Samples share the blocks of the prompt, and each begins with one of its own.
    """
    if look.demand.num_samples == 1:
        return np.full_like(block_size, look.max_tokens)
    begun = look.demand.num_tokens + look.demand.num_samples * block_size
    return np.maximum(look.max_tokens, begun)


def _too_long(fleet: Fleet, rows: IntArray, look: Look) -> TooLong:
    largest, sizes = int(fleet.total_blocks[rows].max()), fleet.block_size[rows]
    need = int((-(-_needed_tokens(look, sizes) // sizes)).min())
    return TooLong("prompt", need, f"at most {largest} KV blocks with its output")
