"""Packing kernels on a GPU against plain torch, bit for bit."""

from dataclasses import replace

import pytest
import torch

from pdserve.cache.kv_region import make_region
from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import KvGeometry
from pdserve.cuda.kv_traffic import KvTraffic
from pdserve.request import BlockId
from tests.support.host_device import HostSum

GEOMETRY = KvGeometry(
    num_layers=3, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", model_revision="r"
)
NUM_BLOCKS = 40


def make_kv(dtype: str, seed: int) -> KvTensors:
    torch.manual_seed(seed)
    kv = KvTensors(replace(GEOMETRY, dtype=dtype), NUM_BLOCKS, device=torch.device("cuda", 0))
    for layer in range(GEOMETRY.num_layers):
        for half in kv.layer(layer):
            half.normal_()
    return kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(range(512), range(8)), (range(5, 300), range(8)), (range(77), range(3, 5))],
)
def test_frames_of_a_gpu_are_what_torch_packs_and_scatters(
    dtype: str, wire_dtype: str, tokens: range, heads: range
) -> None:
    source, target, expected = make_kv(dtype, 1), make_kv(dtype, 2), make_kv(dtype, 2)
    table = tuple(BlockId(int(block)) for block in torch.randperm(NUM_BLOCKS))
    region = make_region(
        table=table, block_size=16, tokens=tokens, layers=range(1, 3), heads=heads, dtype=wire_dtype
    )
    traffic = KvTraffic(source, nccl_max_ctas=4)
    lane = traffic.make_lane()
    frame = torch.empty(source.frame_bytes(region), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    checksum = lane.gather(region, frame, has_sum=True)
    again = lane.add_up(frame)
    torch.cuda.synchronize()
    assert checksum is not None
    assert torch.equal(frame.cpu(), source.pack(region))
    assert checksum.value() == again.value() == HostSum(frame.cpu()).value()
    host = traffic.make_host_frame(frame.numel())
    lane.gather_to_host(region, host)
    torch.cuda.synchronize()
    assert torch.equal(host, frame.cpu())
    KvTraffic(target, nccl_max_ctas=4).scatter(region, host)
    expected.scatter(region, host)
    torch.cuda.synchronize()
    for layer in range(3):
        for one, other in zip(target.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(one, other)
