"""Which transport joins two ranks. Pure."""

from dataclasses import dataclass

GLOO = "gloo"
NCCL = "nccl"
PUSH = "push"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSite:
    """Where one end of a link keeps its KV."""

    transports: tuple[str, ...] = (GLOO,)
    """What it may use, the preferred first."""
    host_id: bytes = b""
    """Equal on two ends of which one can open the other's device memory."""
    device_uuid: str = ""
    """Of its GPU; empty on a CPU."""


def choose_transports(decode: LinkSite, prefill: LinkSite) -> tuple[str, ...]:
    """Returns what is possible and allowed at both ends, in the decode rank's order.

    Push needs device memory that the prefill rank can open: GPUs of one host, or one GPU. NCCL
    refuses two members on one device.
    """
    both_gpus = bool(decode.device_uuid) and bool(prefill.device_uuid)
    is_possible = {
        PUSH: both_gpus and bool(decode.host_id) and decode.host_id == prefill.host_id,
        NCCL: both_gpus and decode.device_uuid != prefill.device_uuid,
        GLOO: True,
    }
    return tuple(
        transport
        for transport in decode.transports
        if transport in prefill.transports and is_possible.get(transport, False)
    )


def describe_mismatch(decode: LinkSite, prefill: LinkSite) -> str:
    """Says, for a refusal, why nothing can join two ends."""

    def describe(site: LinkSite) -> str:
        place = f"on GPU {site.device_uuid}" if site.device_uuid else "on a CPU"
        return f"{', '.join(site.transports) or 'none'} {place}"

    return f"no common transport: decode has {describe(decode)}, prefill {describe(prefill)}"
