"""Whoever raises a ConfigError says which words of it are settings: users know them by flags."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from autoscaler.settings import ScalingSettings
from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import settings_of
from pdserve.config.router import RouterConfig
from pdserve.config.stage import StageConfig
from pdserve.config.worker import WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "pdserve",
    "kv_transfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "autoscaler",
    "simulation",
    "launcher",
)
CONFIGS = (ClusterConfig, RouterConfig, WorkerConfig, StageConfig, ScalingSettings)
NO_FLAGS = {("simulation/shape.py", "block_size")}
"""A field of a profile's file."""


def refusals() -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError":
                    yield path.relative_to(ROOT).as_posix(), node


def words_of(node: ast.Call) -> set[str]:
    """Returns the words of what is written out, without values."""
    strings = ast.walk(node.args[0]) if node.args else ()
    text = " ".join(
        part.value
        for part in strings
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    return set(re.findall(r"(?:(?<=\s)|^)[a-z]+(?:_[a-z]+)+(?=[\s:,]|$)", text))


def declared_by(node: ast.Call) -> set[str]:
    values = [keyword.value for keyword in node.keywords if keyword.arg == "settings"]
    return {
        part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant)
    }


def test_every_refusal_declares_the_settings_that_it_names() -> None:
    fields = {setting.path[-1] for config in CONFIGS for setting in settings_of(config)}
    undeclared = [
        (where, word)
        for where, node in refusals()
        for word in sorted(words_of(node) & fields - declared_by(node))
        if (where, word) not in NO_FLAGS
    ]
    assert undeclared == []


def test_the_refusals_are_found() -> None:
    found = [node for _, node in refusals()]
    assert len(found) > 150
    assert any("ring_slots" in words_of(node) for node in found)
