import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from launcher import fetch_model
from launcher.fetch_model import fetch_from_hub
from launcher.hub_id import HubModel
from launcher.model_source import ModelSource
from pdserve.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "tokenizer.json", "model.safetensors")

RESOLVE = """
import sys
from pathlib import Path
from launcher.model_source import resolve_model
from pdserve.errors import ConfigError
try:
    print(resolve_model(sys.argv[1]))
except ConfigError as error:
    print("refused:", error)
"""


def fill_cache(home: Path, repository: str = "org/tiny", files: tuple[str, ...] = FILES) -> Path:
    """Lays a snapshot out as the hub's client does: blobs, links to them, a branch."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for index, name in enumerate(files):
        blob = root / "blobs" / f"{index:040x}"
        blob.write_text("{}")
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def resolve_offline(home: Path, name: str) -> str:
    """Resolves in a process of its own: the client reads the environment once, at import."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGG"))
    }
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        env=environment | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "Traceback" not in run.stderr
    return run.stdout.strip()


def test_a_cached_model_is_found_offline(tmp_path: Path) -> None:
    snapshot = fill_cache(tmp_path)
    assert resolve_offline(tmp_path, "org/tiny") == str(snapshot)


def test_a_model_that_is_not_cached_is_one_clear_line_offline(tmp_path: Path) -> None:
    answer = resolve_offline(tmp_path, "org/absent")
    assert answer.startswith("refused: no folder org/absent here, nor can it be had")
    assert "it is not in the local cache" in answer
    assert "\n" not in answer


def test_a_cached_model_without_weights_is_refused(tmp_path: Path) -> None:
    fill_cache(tmp_path, files=("config.json", "tokenizer.json"))
    assert "holds no .safetensors weights" in resolve_offline(tmp_path, "org/tiny")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubModel(repository="org/name")),
        ("Qwen/Qwen2.5-0.5B", HubModel(repository="Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubModel(repository="org/name", revision="v1.0")),
        ("org/name@refs/pr/3", HubModel(repository="org/name", revision="refs/pr/3")),
        ("name", None),
        ("/org/name", None),
        ("./org/name", None),
        ("../name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("org/na me", None),
        ("https://hub/org/name", None),
    ],
)
def test_a_hub_id_has_one_slash(name: str, expected: HubModel | None) -> None:
    assert HubModel.parse(name) == expected


class Fetcher:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[HubModel, bool]] = []

    def __call__(self, model: HubModel, *, needs_weights: bool) -> Path:
        self.asked.append((model, needs_weights))
        return self.folder


def test_a_folder_on_disk_comes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).write_text("{}")
    fetch = Fetcher(fill_cache(tmp_path))
    source = ModelSource(cache=tmp_path, report=lambda _: None, fetch=fetch)
    monkeypatch.chdir(tmp_path)
    assert source.resolve("org/name") == folder
    assert fetch.asked == []
    assert source.resolve("org/other", needs_weights=False) == fetch.folder
    assert fetch.asked == [(HubModel(repository="org/other"), False)]


@pytest.mark.parametrize("needs_weights", [True, False])
def test_E9_neither_code_nor_pickles_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, needs_weights: bool
) -> None:
    asked: dict[str, object] = {}

    def download(repository: str, **arguments: object) -> str:
        asked.update(arguments, repository=repository)
        return "/somewhere"

    monkeypatch.setattr(fetch_model, "snapshot_download", download)
    model = HubModel(repository="org/name", revision="v1")
    assert fetch_from_hub(model, needs_weights=needs_weights) == Path("/somewhere")
    assert (asked["repository"], asked["revision"]) == ("org/name", "v1")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert {pattern.rpartition(".")[2] for pattern in patterns} <= {"json", "jinja", "safetensors"}
    assert ("*.safetensors" in patterns) == needs_weights


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "first line\nsecond line")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(GatedRepoError), "it is gated; ask for access"),
        (http_error(RepositoryNotFoundError), "there is no such repository"),
        (http_error(RevisionNotFoundError), "it has no such revision"),
        (LocalEntryNotFoundError("x"), "it is not in the local cache"),
        (ConnectionError("refused\nby peer"), "refused$"),
        (OSError(), "OSError$"),
    ],
)
def test_every_failure_of_the_hub_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(fetch_model, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=f"from the hub: {message}"):
        fetch_from_hub(HubModel(repository="org/name"))
