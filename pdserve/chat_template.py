"""Renders chat messages with the model's own template, in a sandbox.

Only the template that came with the model is run, never one of a client. The sandbox forbids
attribute tricks and changes; the size of the result is bounded while it grows, and the time by
rendering piece by piece.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError, InvalidField
from pdserve.tokenizer import read_tokenizer_config

MAX_RENDER_S = 2.0
MAX_TEMPLATE_CHARACTERS = 256 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


class _TemplateRefused(Exception):
    """The template called `raise_exception`."""


class ChatTemplate:
    """One compiled template. Rendering blocks: call it in a thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compiles a template.

        Raises:
            ConfigError: it is too large or no template.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(f"the chat template has over {MAX_TEMPLATE_CHARACTERS} characters")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Finds the template in `chat_template.jinja` or `tokenizer_config.json`.

        Raises:
            ConfigError: there is one, but it is broken.
        """
        config = read_tokenizer_config(folder)
        special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special)
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ConfigError("chat_template in tokenizer_config.json must be a string")
        return cls(source, special)

    def render(
        self,
        messages: Sequence[Message],
        max_characters: int,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders messages, by default with the opening of an answer behind them.

        Raises:
            InvalidField: the template refuses the messages, or the text becomes too long.
        """
        turns = [{"role": one.role, "content": one.content} for one in messages]
        stop_at_s = time.monotonic() + MAX_RENDER_S
        pieces, num_characters = [], 0
        try:
            for piece in self._template.generate(
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > max_characters:
                    raise InvalidField(
                        "chat.messages", num_characters, f"at most {max_characters} characters"
                    )
                if time.monotonic() > stop_at_s:
                    raise InvalidField(
                        "chat.messages", len(messages), f"rendered within {MAX_RENDER_S} s"
                    )
        except _TemplateRefused as error:
            roles = [one.role for one in messages]
            raise InvalidField("chat.messages", roles, f"as the template says: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidField("chat.messages", len(messages), "renderable") from error
        return "".join(pieces)


def _refuse(message: object) -> NoReturn:
    raise _TemplateRefused(str(message)[:200])


def _strftime_now(pattern: str) -> str:
    return time.strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _token_text(entry: object) -> str:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
