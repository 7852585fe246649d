import os
from pathlib import Path

import pytest

from launcher.output_file import check_writable, write_output
from pdserve.errors import ConfigError


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path):
    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.write_text("kept", encoding="utf-8")
    link.symlink_to(tmp_path / "aim")
    for path in (new, old, link):
        check_writable("--output", path)
    assert old.read_text(encoding="utf-8") == "kept"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "old"]


def test_a_pipe_is_not_opened(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable("--output", pipe)


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"--plot must be a file, got the folder {tmp_path}"):
        check_writable("--plot", tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none/plan", "there is no folder"),
        ("file/plan", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("loop", "symbolic links"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path, name: str, told: str):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=f"--output .*cannot be written: .*{told}"):
        check_writable("--output", tmp_path / name)


def test_a_folder_where_nothing_can_be_made_is_refused():
    # Root may write everywhere but there.
    with pytest.raises(ConfigError, match="--output /proc/plan cannot be written"):
        check_writable("--output", Path("/proc/plan"))


def test_a_device_that_is_full_by_then_is_refused_in_the_same_words():
    check_writable("--output", Path("/dev/full"))
    with pytest.raises(ConfigError, match="--output /dev/full cannot be written: No space left"):
        write_output("--output", Path("/dev/full"), "text")
