"""Frames that are read out of a step while it computes: each holds what the step ends with."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.cache.kv_region import KvRegion
from pdserve.config.engine import EngineConfig
from pdserve.cuda.kv_traffic import KvTraffic, TrafficLane
from pdserve.cuda.marks import LayerMarks
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import PendingStep, SequenceSlice, StepPlan
from pdserve.request import BlockId
from tests.support.cuda_engine import make_cuda_runner
from tests.support.engine_requests import make_request
from tests.support.kv import whole_blocks

NUM_LAYERS, GROUP, CHUNK, NUM_BLOCKS = 8, 2, 2048, 264
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Layers of Llama-3-8B: 2,048 tokens of one take a device longer than the host to launch them."""
GROUPS = tuple(range(first, first + GROUP) for first in range(0, NUM_LAYERS, GROUP))


@dataclass
class Stand:
    runner: CudaRunner
    traffic: KvTraffic
    lane: TrafficLane

    @property
    def marks(self) -> LayerMarks:
        assert self.runner.marks is not None
        return self.runner.marks

    def launch(self, seed: int, start: int = 0, count: int = CHUNK) -> PendingStep:
        """Computes a chunk of a prompt, into the same blocks each time."""
        tokens = tuple(3 + (seed * 97 + 7 * place) % 900 for place in range(2 * CHUNK + 64))
        part = SequenceSlice(
            request=make_request(f"r{seed}", tokens),
            start=start,
            token_ids=tokens[start : start + count],
            block_ids=tuple(BlockId(block) for block in reversed(range(NUM_BLOCKS))),
            output_index=None,
        )
        return self.runner.launch(StepPlan(slices=(part,)))

    def regions(self, start: int = 0, count: int = CHUNK) -> list[KvRegion]:
        """One for each group of layers."""
        size = self.runner.kv.geometry.block_size
        blocks = list(reversed(range(NUM_BLOCKS)))[start // size : (start + count) // size]
        return [whole_blocks(self.runner.kv, blocks, layers) for layers in GROUPS]

    def make_frames(self, regions: list[KvRegion]) -> list[Tensor]:
        kv = self.runner.kv
        frames = [
            torch.zeros(kv.frame_bytes(region), dtype=torch.uint8, device=kv.device)
            for region in regions
        ]
        torch.cuda.synchronize()
        return frames

    def gather(self, regions: list[KvRegion], frames: list[Tensor]) -> None:
        """Launches the reading of regions that the newest step computes."""
        for region, frame in zip(regions, frames, strict=True):
            mark = self.marks.find(self.marks.newest, region.layers.stop)
            assert mark is not None
            self.lane.wait_for(mark)
            self.lane.gather(region, frame, has_sum=True)

    def pack(self, regions: list[KvRegion]) -> list[Tensor]:
        torch.cuda.synchronize()
        return [self.runner.kv.pack(region).cpu() for region in regions]

    def spoil(self) -> None:
        for layer in range(NUM_LAYERS):
            for part in self.runner.kv.layer(layer):
                part.fill_(torch.nan)
        torch.cuda.synchronize()


@pytest.fixture(scope="module", params=["eager", "graphs"])
def stand(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stand:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    engine = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        enforce_eager=request.param == "eager",
    )
    runner = make_cuda_runner(folder, engine, NUM_BLOCKS, "cuda", mark_layers=GROUP)
    traffic = KvTraffic(runner.kv, nccl_max_ctas=1)
    made = Stand(runner, traffic, traffic.make_lane())
    made.launch(1).result()
    return made


@pytest.mark.parametrize("count", [CHUNK, 512, 64])
@pytest.mark.parametrize("start", [0, CHUNK])
def test_frames_gathered_behind_marks_hold_what_their_step_computes(
    stand: Stand, start: int, count: int
) -> None:
    stand.spoil()
    if start:
        stand.launch(5).result()
    regions = stand.regions(start, count)
    frames = stand.make_frames(regions)
    pending = stand.launch(5, start, count)
    stand.gather(regions, frames)
    pending.result()
    for frame, expected in zip(frames, stand.pack(regions), strict=True):
        assert torch.equal(frame.cpu(), expected)
        assert not frame.view(torch.bfloat16).isnan().any()


def test_a_frame_that_awaits_nothing_is_read_too_early(stand: Stand) -> None:
    """So the tests beside this one can fail."""
    regions = stand.regions()[-1:]
    frames = stand.make_frames(regions)
    stand.spoil()
    first, second = stand.launch(5), stand.launch(6)
    stand.lane.gather(regions[0], frames[0], has_sum=False)
    stand.lane.mark().wait()
    assert not second.is_over()
    first.result()
    second.result()
    assert not torch.equal(frames[0].cpu(), stand.pack(regions)[0])


def test_groups_are_there_one_after_another_before_the_step_has_ended(stand: Stand) -> None:
    first, second = stand.launch(2), stand.launch(3)
    found = [stand.marks.find(stand.marks.newest, layers.stop) for layers in GROUPS]
    marks = [mark for mark in found if mark is not None]
    assert len(marks) == len(GROUPS)
    seen = []
    while not second.is_over():
        seen.append(sum(mark.is_reached() for mark in marks))
    assert seen == sorted(seen)
    # The first ones may be reached by the time the launch is made.
    assert len(set(seen)) >= 2
    first.result()
    second.result()
    assert all(mark.is_reached() for mark in marks)


def test_A10_a_step_launched_after_a_cancel_leaves_what_is_read_as_it_was(stand: Stand) -> None:
    regions = stand.regions()
    stand.launch(7).result()
    expected = stand.pack(regions)
    stand.spoil()
    frames = stand.make_frames(regions)
    pending = stand.launch(7)
    stand.gather(regions, frames)
    stand.traffic.let_steps_wait_for(stand.lane.mark())
    other = stand.launch(8)
    pending.result()
    other.result()
    now = stand.pack(regions)
    for frame, before, after in zip(frames, expected, now, strict=True):
        assert torch.equal(frame.cpu(), before)
        assert not torch.equal(after, before)
