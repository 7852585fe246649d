"""Settings from flags and environment, and back to flags; the only reader of the environment.

Every field of a configuration is one flag: `max_num_seqs` is `--max-num-seqs`, or
PDSERVE_MAX_NUM_SEQS in the environment; the flag wins. Fields of `handoff` and `faults` carry that
word in front (`--handoff-lease-s`, `--fault-step-delay-s`), those of `engine` do not. A bool's
flag may stand without a value; a tuple's flag may be repeated, and its variable holds several
values between spaces.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from pdserve.config.engine import DEVICE_DEFAULTS, DeviceKind, EngineConfig
from pdserve.errors import ConfigError

T = TypeVar("T")

NCCL_FILES = (Path("~/.nccl.conf"), Path("/etc/nccl.conf"))
"""Where NCCL reads settings beside its environment."""
ENVIRONMENT_PREFIX = "PDSERVE_"
PAIRS_FLAG = "pairs_flag"
"""In a field's metadata: see Setting."""
_FLAG_PREFIX = {"engine": "", "handoff": "handoff-", "faults": "fault-"}
_RENAMED = {
    "redis_url": "redis",
    "kv_cache_memory_bytes": "kv-cache-memory",
    "tensor_parallel": "tensor-parallel-size",
    "pipeline_parallel": "pipeline-parallel-size",
    "api_keys": "api-key",
    "profiles": "profile",
    "slo_classes": "slo-class",
    "decode_tensor_parallel": "decode-tensor-parallel-size",
    "decode_pipeline_parallel": "decode-pipeline-parallel-size",
    "num_prefill": "prefill",
    "num_decode": "decode",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_MOST_BYTES = 2.0**63
_SIZE_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of a configuration, reachable by a flag and a variable."""

    path: tuple[str, ...]
    """Field names from the outermost configuration inwards."""
    kind: object
    """The annotated type without `None`."""
    is_required: bool
    default: object
    pairs_flag: str | None = None
    """The flag that takes NAME=VALUE of all fields of an inner configuration."""

    @property
    def flag(self) -> str:
        """The flag, with its dashes."""
        name = self.path[-1]
        if self.pairs_flag is not None:
            return f"{self.pairs_flag} {name}"
        prefix = "".join(_FLAG_PREFIX[outer] for outer in self.path[:-1])
        return f"--{prefix}{_RENAMED.get(name, name.replace('_', '-'))}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.flag[2:].replace("-", "_").upper()

    @property
    def is_list(self) -> bool:
        """The flag may be given several times."""
        return get_origin(self.kind) is tuple

    def parse(self, text: str, source: str) -> object:
        """Turns text into a value of the field's type.

        Raises:
            ConfigError: the text is no such value; the message names `source`.
        """
        try:
            return parse_value(self.kind, text, is_size=self.path[-1].endswith("_bytes"))
        except ValueError as error:
            raise ConfigError(f"{source} must be {error}, got {text[:64]!r}") from None


class _Parser(argparse.ArgumentParser):
    """Raises our own error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def from_argv(
    config_class: type[T],
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    fixed: Mapping[str, object] | None = None,
) -> T:
    """Builds a configuration; `--help` prints all flags and ends the process.

    Args:
        config_class: a frozen dataclass of `pdserve.config`.
        argv: flags and values, without the program's name.
        environment: variables, used where no flag is given.
        program: shown by `--help`.
        fixed: outermost fields that no flag may change.

    Raises:
        ConfigError: an unknown flag, a bad value, or a required one missing.
    """
    fixed = fixed or {}
    settings = [s for s in settings_of(config_class) if s.path[0] not in fixed]
    parser = _Parser(prog=program, allow_abbrev=False)
    for setting in settings:
        shown = "required" if setting.is_required else f"default {setting.default}"
        parser.add_argument(
            setting.flag,
            dest=setting.flag,
            metavar="VALUE",
            action="append" if setting.is_list else "store",
            nargs="?" if setting.kind is bool else None,
            const="true" if setting.kind is bool else None,
            help=f"{shown} [{setting.variable}]",
        )
    flags: dict[str, str | list[str] | None] = vars(parser.parse_args(argv))
    values: dict[tuple[str, ...], object] = {(name,): value for name, value in fixed.items()}
    for setting in settings:
        text, source = flags[setting.flag], setting.flag
        if text is None:
            text, source = environment.get(setting.variable), setting.variable
        if isinstance(text, list):
            values[setting.path] = tuple(text)
        elif text is not None:
            values[setting.path] = setting.parse(text, source)
        elif setting.is_required:
            raise ConfigError(f"{setting.flag} is required")
    return _build(config_class, values)


def to_argv(config: object, *, without: Sequence[str] = ()) -> list[str]:
    """Writes a configuration as flags that `from_argv` reads back to an equal one."""
    argv: list[str] = []
    for setting in settings_of(type(config)):
        if setting.path[0] in without:
            continue
        value: object = config
        for name in setting.path:
            value = _field_value(value, name)
        if isinstance(value, tuple):
            argv += [part for one in value for part in (setting.flag, str(one))]
        elif value is not None:
            argv += [setting.flag, str(value)]
    return argv


def from_pairs(config_class: type[T], pairs: Sequence[str], source: str) -> T:
    """Builds a configuration without required fields from `name=value` pairs.

    Raises:
        ConfigError: an unknown name or a bad value; the message names `source`.
    """
    settings = {setting.path[-1]: setting for setting in settings_of(config_class)}
    values: dict[tuple[str, ...], object] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in settings:
            raise ConfigError(f"{source} knows {', '.join(settings)}, got {name[:64]!r}")
        values[settings[name].path] = settings[name].parse(text, f"{source} {name}")
    with renaming({name: f"{source} {name}" for name in settings}):
        return _build(config_class, values)


def tell_by_flags(error: ConfigError, config_class: type) -> str:
    """Returns what is wrong in the words of whoever typed flags: `--max-model-len must be ...`.

    Args:
        error: what is wrong.
        config_class: what the flags make. Settings that are no field of it are those of a command
            whose parameters have the same names.
    """
    names = {name: "--" + name.replace("_", "-") for name in error.settings if name[0] != "-"}
    names |= {setting.path[-1]: setting.flag for setting in settings_of(config_class)}
    return str(error.renamed(names))


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Names settings in refusals as whoever chose them knows them."""
    try:
        yield
    except ConfigError as error:
        raise error.renamed(names) from error


def settings_of(config_class: type) -> tuple[Setting, ...]:
    """Lists all fields of a configuration, nested ones flattened."""
    hints = get_type_hints(config_class)
    found: list[Setting] = []
    for field in fields(config_class):
        kind = _without_none(hints[field.name])
        if isinstance(kind, type) and is_dataclass(kind):
            inner, pairs_flag = settings_of(kind), field.metadata.get(PAIRS_FLAG)
            found += [
                Setting(
                    path=(field.name, *s.path),
                    kind=s.kind,
                    is_required=s.is_required,
                    default=s.default,
                    pairs_flag=pairs_flag,
                )
                for s in inner
            ]
            continue
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        found.append(
            Setting(
                path=(field.name,),
                kind=kind,
                is_required=not has_default,
                default=None if field.default is MISSING else field.default,
            )
        )
    return tuple(found)


def parse_value(kind: object, text: str, *, is_size: bool = False) -> object:
    """Parses text as a bool, int, float, str, Literal or StrEnum.

    Raises:
        ValueError: its text says what is allowed, to stand behind "must be".
    """
    if get_origin(kind) is Literal:
        return _one_of(tuple(str(choice) for choice in get_args(kind)), text)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(_one_of(tuple(member.value for member in kind), text))
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise ValueError("true or false")
        return _TRUTH[text.lower()]
    if kind is int:
        return parse_size(text) if is_size else _parse_int(text)
    if kind is float:
        return _parse_float(text)
    if get_origin(kind) is tuple:
        return tuple(text.split())
    assert kind is str, f"no parser for {kind}"
    return text


def parse_size(text: str) -> int:
    """Parses bytes, with K, M, G or T for powers of 1024: `512M` is 536,870,912.

    Raises:
        ValueError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 512M or 2G")
    size_bytes = float(match[1]) * 1024.0 ** _SIZE_POWER[match[2].lower()]
    if size_bytes >= _MOST_BYTES:
        raise ValueError("a size such as 512M or 2G, below 2^63 bytes")
    return int(size_bytes)


def read_visible_gpus() -> str | None:
    """Returns CUDA_VISIBLE_DEVICES of this process; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def names_nccl_interface() -> bool:
    """Says whether this node's user or administrator chose NCCL's network interface or family.

    In the environment, or in a file that NCCL reads, which the environment would overrule.
    """
    names = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID")
    if any(os.environ.get(name) for name in names):
        return True
    own = os.environ.get("NCCL_CONF_FILE")
    files = NCCL_FILES if own is None else (Path(own), *NCCL_FILES)
    for path in files:
        try:
            lines = path.expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if any(line.strip().startswith(names) for line in lines):
            return True
    return False


def read_runtime_folder() -> str | None:
    """Returns the user's folder for what lives no longer than a login, if the system has one."""
    return os.environ.get("XDG_RUNTIME_DIR") or None


def read_environment() -> dict[str, str]:
    """Returns the variables that belong to pdserve."""
    return {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIX)}


def cache_folder() -> Path:
    """Returns where converted models and measured tables are kept.

    It is $XDG_CACHE_HOME/pdserve, or ~/.cache/pdserve.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def _build(config_class: type[T], values: Mapping[tuple[str, ...], object]) -> T:
    hints = get_type_hints(config_class)
    arguments: dict[str, object] = {path[0]: v for path, v in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        arguments[name] = _build(cast(type, hints[name]), inner)
    if config_class is EngineConfig:
        device = cast(DeviceKind, arguments.get("device", "cpu"))
        arguments = {**asdict(DEVICE_DEFAULTS[device]), **arguments}
    return cast(Callable[..., T], config_class)(**arguments)


def _field_value(config: object, name: str) -> object:
    # The names come from dataclasses.fields, never from outside.
    value: object = getattr(config, name)
    return value


def _without_none(hint: object) -> object:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) in (Literal, tuple) or not kinds:
        return hint
    assert len(kinds) == 1, f"a setting has one type, got {hint}"
    return cast(object, kinds[0])


def _one_of(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ValueError("one of " + ", ".join(choices))
    return text


def _parse_int(text: str) -> int:
    if re.fullmatch(r"[+-]?\d+", text) is None:
        raise ValueError("a whole number")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number
