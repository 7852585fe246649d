"""A GGUF file that is damaged is refused in one line, whatever the reader makes of it."""

import random
from pathlib import Path

import pytest

from launcher import convert_model
from pdserve.errors import ConfigError
from pdserve.models.convert_gguf import convert_gguf
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "m.gguf", make_tiny(folder / "source", "llama")).read_bytes()


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 5000, 0.5, 0.999])
def test_a_file_cut_short_is_refused_without_words_of_the_reader(
    whole: bytes, kept: float, tmp_path: Path
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(ConfigError) as caught:
        convert_gguf(path, tmp_path / "target")
    expected = f"{path} is no readable GGUF file: it is cut short or damaged"
    assert str(caught.value) == expected
    assert not (tmp_path / "target").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "target")


def test_flipped_bytes_end_in_a_model_or_in_one_line(
    whole: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(0)
    statuses = set()
    for number in range(40):
        spoilt = bytearray(whole)
        for _ in range(4):
            spoilt[draw.randrange(12_000)] = draw.randrange(256)
        path = tmp_path / "spoilt.gguf"
        path.write_bytes(bytes(spoilt))
        target = tmp_path / f"target{number}"
        monkeypatch.setattr("sys.argv", ["convert", str(path), str(target)])
        status = convert_model.main()
        statuses.add(status)
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert told.count("\n") == (1 if status else 0)
        assert target.exists() == (status == 0)
    assert statuses == {0, 2}
