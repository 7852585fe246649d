"""Which rank sends which layers and KV heads to which rank.

Both replicas cut the model as `pdserve.config.shape` says. A lane joins a prefill rank and a decode
rank that have layers and heads in common. A head that several prefill ranks hold is sent to each
decode rank by one of them; a head that several decode ranks hold is sent to each of them.
"""

from dataclasses import asdict, dataclass

from pdserve.config.model import AGREED_FIELDS, KvGeometry
from pdserve.config.shape import ITEM_BYTES, WIRE_BYTES, RankPart, count_frame_bytes
from pdserve.errors import ConfigError

AUTO = "auto"
"""As wire dtype: the narrower of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPair:
    """The KV of both ends, and how it travels; see `make_pair`."""

    prefill: KvGeometry
    decode: KvGeometry
    wire_dtype: str

    def frame_bytes(self, num_tokens: int, num_layers: int, num_heads: int) -> int:
        """Bytes of the keys and values of some tokens, layers and heads, in a frame."""
        num_rows = 2 * num_tokens * num_layers * num_heads
        return count_frame_bytes(num_rows, self.decode.head_dim, self.wire_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What one pair of ranks exchanges, for every token."""

    prefill_rank: int
    decode_rank: int
    layers: range
    heads: range


def make_pair(prefill: KvGeometry, decode: KvGeometry, wire_dtype: str = AUTO) -> KvPair:
    """Joins two geometries.

    Raises:
        ConfigError: they do not go together; the text names the field.
    """
    check_compatible(prefill, decode)
    if wire_dtype == AUTO:
        wire_dtype = min(prefill.dtype, decode.dtype, key=lambda dtype: ITEM_BYTES[dtype])
    if wire_dtype not in WIRE_BYTES:
        known = ", ".join((AUTO, *WIRE_BYTES))
        raise ConfigError(
            f"wire_dtype must be one of {known}, got {wire_dtype!r}", settings=("wire_dtype",)
        )
    return KvPair(prefill=prefill, decode=decode, wire_dtype=wire_dtype)


def check_compatible(prefill: KvGeometry, decode: KvGeometry) -> None:
    """Checks that one worker's KV can be turned into the other's.

    Raises:
        ConfigError: names the first field that differs, or is not supported, with its values.
    """
    mine, theirs = asdict(prefill), asdict(decode)
    for name in AGREED_FIELDS:
        if mine[name] != theirs[name]:
            raise ConfigError(
                f"{name} differs between the prefill and the decode worker: "
                f"{mine[name]!r} and {theirs[name]!r}",
                settings=(name,),
            )
    for geometry in (prefill, decode):
        if geometry.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ConfigError(
                f"dtype must be one of {known}, got {geometry.dtype!r}", settings=("dtype",)
            )
        if geometry.block_size < 1:
            raise ConfigError(
                f"block_size must be at least 1, got {geometry.block_size}",
                settings=("block_size",),
            )
        _ = geometry.parts


def make_lanes(pair: KvPair) -> tuple[Lane, ...]:
    """Returns all lanes; together they fill every decode rank's layers and heads exactly once."""
    senders = pair.prefill.parts
    return tuple(
        Lane(
            prefill_rank=sender.rank,
            decode_rank=receiver.rank,
            layers=_common(sender.layers, receiver.layers),
            heads=_common(sender.kv_heads, receiver.kv_heads),
        )
        for receiver in pair.decode.parts
        for sender in senders
        if _common(sender.layers, receiver.layers)
        and _common(sender.kv_heads, receiver.kv_heads)
        and _is_chosen(sender, receiver, senders)
    )


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _is_chosen(sender: RankPart, receiver: RankPart, senders: tuple[RankPart, ...]) -> bool:
    """Says whether this one, of all ranks that hold the same, serves a receiver: they share."""
    holders = [
        part.rank
        for part in senders
        if part.stage == sender.stage and part.kv_heads == sender.kv_heads
    ]
    return holders[receiver.tensor_rank % len(holders)] == sender.rank
