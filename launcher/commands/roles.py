"""`pdserve prefill-worker`, `decode-worker`, `stage` and `router`: one role in this very process.

The process is replaced by the role's own module, so that no other command pays for its imports.
"""

import os
from typing import Annotated

import typer

from launcher.role_commands import role_command

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Flags = Annotated[list[str] | None, typer.Argument(metavar="FLAGS", help="See --help.")]


def register_roles(app: typer.Typer) -> None:
    """Adds the role commands; each reads its own flags, `--help` among them."""
    for name, command, text in (
        ("router", _router, "Run one router front."),
        ("prefill-worker", _prefill_worker, "Run one prefill replica."),
        ("decode-worker", _decode_worker, "Run one decode replica."),
        ("stage", _stage, "Run a pipeline stage of a replica whose face is on another node."),
    ):
        app.command(name, help=text, context_settings=_PASS_ON, add_help_option=False)(command)


def _router(flags: Flags = None) -> None:
    _become("router", flags)


def _prefill_worker(flags: Flags = None) -> None:
    _become("prefill-worker", flags)


def _decode_worker(flags: Flags = None) -> None:
    _become("decode-worker", flags)


def _stage(flags: Flags = None) -> None:
    _become("stage", flags)


def _become(role: str, flags: list[str] | None) -> None:
    argv = [*role_command(role), *(flags or [])]
    os.execv(argv[0], argv)
