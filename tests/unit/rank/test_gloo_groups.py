"""Real Gloo groups; the ranks are threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from pdserve.config.shape import RankPart, split_model
from pdserve.rank.gloo_groups import (
    GlooTensorGroup,
    connect_stages,
    connect_tensor_group,
)
from pdserve.rank.meeting import FolderMeeting

T = TypeVar("T")
HOST = "127.0.0.1"


def parts_of(tensor: int, stages: int) -> tuple[RankPart, ...]:
    return split_model(
        num_layers=4, num_kv_heads=4, tensor_parallel=tensor, pipeline_parallel=stages
    )


def on_all(parts: tuple[RankPart, ...], work: Callable[[RankPart], T]) -> list[T]:
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, parts, timeout=60))


def connect(folder: Path, part: RankPart, tensor: int) -> GlooTensorGroup:
    group = connect_tensor_group(FolderMeeting(folder), part, tensor, HOST)
    assert group is not None
    return group


def test_columns_are_gathered_in_the_order_of_the_ranks_whatever_their_widths(
    tmp_path: Path,
) -> None:
    whole = torch.arange(21.0).view(3, 7)
    starts = (0, 5, 6)
    widths = (5, 1, 1)

    def work(part: RankPart) -> torch.Tensor:
        group = connect(tmp_path, part, 3)
        start = starts[part.tensor_rank]
        return group.gather(whole[:, start : start + widths[part.tensor_rank]], widths)

    parts = split_model(num_layers=1, num_kv_heads=3, tensor_parallel=3, pipeline_parallel=1)
    assert all(torch.equal(found, whole) for found in on_all(parts, work))


def test_sums_have_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    summands = torch.randn(4, 5, 9, generator=generator)

    def work(part: RankPart) -> torch.Tensor:
        return connect(tmp_path, part, 4).sum(summands[part.tensor_rank])

    expected = summands[0] + summands[1] + summands[2] + summands[3]
    assert all(torch.equal(found, expected) for found in on_all(parts_of(4, 1), work))


def test_activations_go_to_the_next_stage_and_logits_to_rank_0(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3)
    links: list[object] = []  # what was sent lives as long as its link

    def work(part: RankPart) -> torch.Tensor | None:
        link = connect_stages(FolderMeeting(tmp_path), part, 2, 2, torch.float32, HOST)
        assert link is not None
        links.append(link)
        if part.stage == 0:
            link.send(x + part.tensor_rank)
            return link.expect_logits(1, 3).wait() if part.rank == 0 else None
        received = link.receive(2, 3)
        if part.tensor_rank == 0:
            link.send_logits(received.sum(0, keepdim=True))
        return received

    found = on_all(parts_of(2, 2), work)
    assert found[0] is not None
    assert torch.equal(found[0], x.sum(0, keepdim=True))
    assert torch.equal(found[2], x)
    assert torch.equal(found[3], x + 1)


def test_a_stage_goes_on_while_the_one_behind_has_not_begun(tmp_path: Path) -> None:
    has_sent, all_done = threading.Event(), threading.Barrier(2)
    x = torch.arange(6.0).view(2, 3)

    def work(part: RankPart) -> list[torch.Tensor]:
        link = connect_stages(FolderMeeting(tmp_path), part, 1, 2, torch.float32, HOST)
        assert link is not None
        if part.stage == 0:
            expected = []
            for step in range(2):
                link.send(x + step)
                expected.append(link.expect_logits(1, 3))
            has_sent.set()
            logits = [one.wait() for one in expected]
            all_done.wait(60)
            return logits
        assert has_sent.wait(60)
        received = [link.receive(2, 3) for _ in range(2)]
        for one in received:
            link.send_logits(one.sum(0, keepdim=True))
        # What was sent lives as long as the link.
        all_done.wait(60)
        return received

    found = on_all(parts_of(1, 2), work)
    for step in range(2):
        assert torch.equal(found[1][step], x + step)
        assert torch.equal(found[0][step], (x + step).sum(0, keepdim=True))


def test_one_rank_needs_no_group(tmp_path: Path) -> None:
    (part,) = parts_of(1, 1)
    assert connect_tensor_group(FolderMeeting(tmp_path), part, 1, HOST) is None
    assert connect_stages(FolderMeeting(tmp_path), part, 1, 1, torch.float32, HOST) is None
