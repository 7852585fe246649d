import pytest

from kv_transfer.transport_choice import LinkSite, choose_transports, describe_mismatch

ALL = ("push", "nccl", "gloo")


def gpu(uuid: str, host: bytes = b"h", transports: tuple[str, ...] = ALL) -> LinkSite:
    return LinkSite(transports=transports, host_id=host, device_uuid=uuid)


CPU = LinkSite()


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (gpu("a"), gpu("b"), ("push", "nccl", "gloo")),
        (gpu("a"), gpu("a"), ("push", "gloo")),
        (gpu("a"), gpu("b", b"other"), ("nccl", "gloo")),
        (gpu("a", b""), gpu("b", b""), ("nccl", "gloo")),
        (CPU, CPU, ("gloo",)),
        (gpu("a"), CPU, ("gloo",)),
        (CPU, gpu("a"), ("gloo",)),
        (gpu("a", transports=("gloo", "nccl")), gpu("b"), ("gloo", "nccl")),
        (gpu("a"), gpu("b", transports=("nccl",)), ("nccl",)),
        (gpu("a", transports=("push",)), gpu("b", b"other"), ()),
        (gpu("a", transports=("nccl",)), gpu("a"), ()),
        (gpu("a"), gpu("b", transports=("carrier pigeon", "gloo")), ("gloo",)),
    ],
)
def test_what_both_ends_can_and_may_in_the_decode_rank_s_order(
    decode: LinkSite, prefill: LinkSite, expected: tuple[str, ...]
) -> None:
    assert choose_transports(decode, prefill) == expected


def test_a_refusal_names_both_ends() -> None:
    text = describe_mismatch(gpu("a", transports=("push",)), LinkSite(transports=()))
    assert text == "no common transport: decode has push on GPU a, prefill none on a CPU"
