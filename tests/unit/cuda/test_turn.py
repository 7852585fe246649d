import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pdserve.cuda.turn import taking_turn


def hold(folder: Path, has_it: Event, is_over: Event) -> None:
    with taking_turn("GPU-1", 10.0, folder):
        has_it.set()
        is_over.wait(60)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_turn_is_free_again_when_its_process_leaves_or_dies(tmp_path: Path, end: str) -> None:
    context = multiprocessing.get_context("spawn")
    has_it, is_over = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, has_it, is_over))
    other.start()
    assert has_it.wait(60)
    with taking_turn("GPU-1", 0.1, tmp_path) as has_turn:
        assert not has_turn, "the other process has it"
    with taking_turn("GPU-2", 0.1, tmp_path) as has_turn:
        assert has_turn, "another GPU"
    if end == "leaves":
        is_over.set()
    else:
        other.kill()
    other.join(30)
    with taking_turn("GPU-1", 10.0, tmp_path) as has_turn:
        assert has_turn


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    with taking_turn("GPU-1", 0.1, tmp_path):
        pass
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with taking_turn("GPU-1", 0.1, tmp_path) as has_turn:
        assert not has_turn
