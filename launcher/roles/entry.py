"""What all roles do first: read their settings, find their model, and fail in one clear line."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from launcher.model_source import resolve_model
from pdserve.config.load import from_argv, read_environment, tell_by_flags
from pdserve.config.router import RouterConfig
from pdserve.config.stage import StageConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.line_output import write_line
from pdserve.request import Role


def run_worker(role: Role | None, run: Callable[[WorkerConfig], int]) -> int:
    """Runs a worker with the settings of this process; returns its exit status.

    Without a role, a flag says which one it is to have first.
    """
    try:
        config = from_argv(
            WorkerConfig,
            sys.argv[1:],
            read_environment(),
            program=f"pdserve {role or 'either'}-worker",
            fixed={} if role is None else {"role": role},
        )
        engine = config.engine
        folder = _resolve(engine.model, needs_weights=engine.load_format != "dummy")
        return run(replace(config, engine=replace(engine, model=str(folder))))
    except ConfigError as error:
        return _refuse(error, WorkerConfig)


def run_router(run: Callable[[RouterConfig], int]) -> int:
    """Runs a router with the settings of this process; returns its exit status."""
    try:
        config = from_argv(RouterConfig, sys.argv[1:], read_environment(), program="pdserve router")
        folder = _resolve(config.model, needs_weights=False)
        name = config.served_model_name or config.model
        return run(replace(config, model=str(folder), served_model_name=name))
    except ConfigError as error:
        return _refuse(error, RouterConfig)


def run_stage(run: Callable[[StageConfig], int]) -> int:
    """Holds a stage with the settings of this process; returns its exit status."""
    try:
        config = from_argv(StageConfig, sys.argv[1:], read_environment(), program="pdserve stage")
        if config.model is not None:
            config = replace(config, model=str(_resolve(config.model, needs_weights=False)))
        return run(config)
    except ConfigError as error:
        return _refuse(error, StageConfig)


def _resolve(model: str, *, needs_weights: bool) -> Path:
    return resolve_model(model, needs_weights=needs_weights, report=_write_line)


def _refuse(error: ConfigError, config_class: type) -> int:
    _write_line(f"error: {tell_by_flags(error, config_class)}")
    return 2


def _write_line(line: str) -> None:
    write_line(sys.stderr, line)
