"""Models of the Hugging Face hub: `org/name`, or `org/name@revision`.

The hub's own client does the work, so its cache (HF_HOME), its token (HF_TOKEN) and its offline
switch (HF_HUB_OFFLINE) hold as for any other program.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pdserve.errors import ConfigError

DESCRIPTION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
LEFT_OUT = ("*/*", "consolidated*")
"""Other formats in folders of their own, and a second copy of Mistral's weights."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A repository of the hub."""

    repository: str
    revision: str | None = None
    """A branch, tag or commit; None is the main branch."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Reads `org/name[@revision]`; None if the name has another form."""
        match = _HUB_ID.fullmatch(name)
        return None if match is None else cls(repository=match[1], revision=match[2])


def fetch_from_hub(model: HubModel, *, needs_weights: bool = True) -> Path:
    """Returns the model's folder in the hub's cache, downloading what is missing.

    Nothing but descriptions, tokenizer and safetensors is ever fetched: no code, no pickles.

    Raises:
        ConfigError: it is neither cached nor to be had; the text is one line.
    """
    patterns = [*DESCRIPTION_FILES, *(WEIGHT_FILES if needs_weights else ())]
    try:
        folder = snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=list(LEFT_OUT),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"cannot get model {model.repository}: {_reason(error)}") from error
    return Path(folder)


def _reason(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "it is gated; ask for access on the hub and set HF_TOKEN"
        case RevisionNotFoundError():
            return "it has no such revision"
        case RepositoryNotFoundError():
            return "there is no such repository, or it is private and HF_TOKEN does not open it"
        case OfflineModeIsEnabled():
            return "it is not in the local cache and HF_HUB_OFFLINE is set"
        case LocalEntryNotFoundError():
            return "it is not in the local cache, and the hub is offline or cannot be reached"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
