"""Carries a worker's settings from its face to its rank as JSON on the command line."""

import json
from dataclasses import asdict

from pdserve.config.engine import EngineConfig
from pdserve.config.worker import FaultConfig, HandoffConfig, WorkerConfig
from pdserve.request import Role


def worker_config_to_json(config: WorkerConfig) -> str:
    """Encodes all settings."""
    return json.dumps(asdict(config))


def worker_config_from_json(text: str) -> WorkerConfig:
    """Decodes what `worker_config_to_json` made.

    Raises:
        ConfigError: a value fails the checks of its type.
    """
    fields = json.loads(text)
    handoff = {**fields["handoff"], "transports": tuple(fields["handoff"]["transports"])}
    return WorkerConfig(
        **{
            **fields,
            "role": Role(fields["role"]),
            "engine": EngineConfig(**fields["engine"]),
            "handoff": HandoffConfig(**handoff),
            "faults": FaultConfig(**fields["faults"]),
        }
    )
