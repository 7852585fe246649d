"""Gets a model of the hub in a process of its own: `python -m launcher.fetch_model ID [all]`.

The hub's client takes a third of a second to import, which no other process shall pay.
The hub's own client does the work, so its cache (HF_HOME), its token (HF_TOKEN) and its offline
switch (HF_HUB_OFFLINE) hold as for any other program.
"""

import sys
from pathlib import Path

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

from launcher.hub_id import HubModel
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
        raise ConfigError(
            f"no folder {model.repository} here, nor can it be had from the hub: {_reason(error)}"
        ) from error
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


def main() -> int:
    """Prints the folder of argv[1], with weights if `all` follows; exits 2 with one line if not."""
    model = HubModel.parse(sys.argv[1])
    assert model is not None
    try:
        folder = fetch_from_hub(model, needs_weights=sys.argv[2:] == ["all"])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
