"""Text to token ids, off the event loop."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from pdserve.detokenizer import TokenTable
from pdserve.errors import ConfigError


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, fast: FastTokenizer, table: TokenTable) -> None:
        """Use `load`."""
        self._fast = fast
        self.table = table
        self.max_token_characters = max(
            (len(part) for part in table.token_bytes if part is not None), default=1
        )
        """No token stands for more characters than this."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads `tokenizer.json`.

        Raises:
            ConfigError: the file is missing, broken, or of an unknown family.
        """
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        try:
            table = TokenTable.from_tokenizer_json(text)
            fast = FastTokenizer.from_str(text)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{path} is no tokenizer: {str(error)[:200]}") from error
        return cls(fast, table)

    @property
    def vocab_size(self) -> int:
        """Ids from 0 up to this one have a text (the model may have more rows)."""
        return len(self.table.token_bytes)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Tokenizes in a thread.

        `encode` holds the interpreter lock, 159k tokens stalled the loop for 431 ms;
        `encode_batch_fast` releases it (1-10 ms).
        """
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes a whole sequence the library's way, in a thread; streams use `Detokenizer`.

        As with `encode`: of 131,072 ids `decode` holds the interpreter lock for all of its 42 ms,
        `decode_batch` for 3.
        """
        return await asyncio.to_thread(self._decode, token_ids, skip_special_tokens)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        (text,) = self._fast.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return text


def read_tokenizer_config(folder: Path) -> dict[str, object]:
    """Reads `tokenizer_config.json`; empty when there is none.

    Raises:
        ConfigError: the file is broken.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object")
    return config
