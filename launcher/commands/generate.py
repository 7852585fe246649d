"""`pdserve generate`: one request, streamed to the terminal."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.client import generate_stream, open_sync_channel, to_dict
from pdserve.errors import ConfigError, InvalidField
from pdserve.rpc.v1 import inference_pb2, types_pb2

_ARGUMENTS = {
    "text": "PROMPT",
    "token_ids": "--prompt-ids",
    "stop_token_ids": "--stop-token-id",
}
"""Where a field of the request has another name than its flag."""
DEFAULT_ADDRESS = "127.0.0.1:50051"
Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The router.")]
ApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="If the router asks for one.", show_envvar=True)
]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Raw text to continue.")] = None,
    messages: Annotated[
        Path | None, typer.Option(help="JSON file: a chat as [{role, content}, ...].")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="Token ids to continue.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the served model.", allow_from_autoenv=False)
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Made by the server if absent.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens; 256 if absent.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; 1 if absent.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Drawn by the server if absent.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Stop token; may be repeated.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No stop before this many.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run past the EOS.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Alternatives per token; 0: the chosen token alone.")
    ] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Time budget of the request.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")
    ] = False,
) -> int:
    """Generate from PROMPT, a chat or token ids, streaming the text."""
    try:
        sampling = types_pb2.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_id,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos or None,
            logprobs=logprobs,
        )
    except ValueError as error:
        # Beyond what the message can hold.
        raise ConfigError(f"a number is too large or too small: {error}") from error
    request = inference_pb2.GenerateRequest(
        request_id=request_id or "", model=model or "", sampling=sampling
    )
    set_prompt(request, prompt, messages, prompt_ids)
    with open_sync_channel(address) as channel:
        written: list[str] = []

        def on_text(text: str) -> None:
            if not as_json:
                written.append(text[-1:])
                _write_text(text)

        try:
            generation = generate_stream(
                channel,
                request,
                timeout_s=timeout_s,
                api_key=api_key,
                address=address,
                on_text=on_text,
            )
        except InvalidField as error:
            raise error.renamed(flag_of(error.field)) from error
        finally:
            if written:
                # An error's line must not be glued to the text before it.
                sys.stdout.write("\n")
                sys.stdout.flush()
    if as_json:
        typer.echo(json.dumps(to_dict(generation), ensure_ascii=False))
    return 0


def flag_of(field: str) -> str:
    """Returns the flag that a field of the request comes from.

    Of a list that is a flag given several times, or one value, places say nothing; those of
    messages are kept.
    """
    head, bracket, rest = field.partition("[")
    if head in ("chat", "chat.messages"):
        return f"--messages {bracket}{rest}".rstrip()
    name = head.removeprefix("sampling.")
    return _ARGUMENTS.get(name, f"--{name.replace('_', '-')}")


def set_prompt(
    request: inference_pb2.GenerateRequest,
    prompt: str | None,
    messages: Path | None,
    prompt_ids: str | None,
) -> None:
    """Fills in exactly one form of prompt.

    Raises:
        ConfigError: none or several were given, or one cannot be read.
    """
    if sum(form is not None for form in (prompt, messages, prompt_ids)) != 1:
        raise ConfigError("give exactly one of PROMPT, --messages and --prompt-ids")
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.CopyFrom(read_chat(messages))
    elif prompt_ids is not None:
        request.token_ids.CopyFrom(parse_ids(prompt_ids))


def read_chat(path: Path) -> inference_pb2.ChatPrompt:
    """Reads a chat from a JSON file: a list of {role, content}, or an object with `messages`.

    Raises:
        ConfigError: the file cannot be read or has another shape.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --messages {path}: {error}") from error
    entries = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(entries, list):
        raise ConfigError(f"--messages {path} must hold a list of {{role, content}}")
    chat = inference_pb2.ChatPrompt()
    for entry in entries:
        role, content = (
            (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(f"--messages {path}: each message needs a text role and content")
        chat.messages.add(role=role, content=content)
    return chat


def parse_ids(text: str) -> types_pb2.TokenIds:
    """Parses `1,2,3`.

    Raises:
        ConfigError: a part is no token id.
    """
    try:
        return types_pb2.TokenIds(ids=[int(part) for part in text.split(",")])
    except ValueError:
        raise ConfigError(
            f"--prompt-ids must be whole numbers joined by commas, got {text[:64]!r}"
        ) from None


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
