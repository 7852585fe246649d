"""Makes flags of dataclasses: a command takes groups of options instead of sixty parameters."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Returns a command with one flag for each field of the dataclasses that `command` takes.

    A field is annotated as typer wants a parameter to be. Flags come in the order of the groups,
    and within a group in that of its fields.

    Raises:
        TypeError: two groups have a field of one name.
    """
    groups = get_type_hints(command)
    groups.pop("return", None)

    @functools.wraps(command)
    def run(**values: object) -> int:
        return command(
            **{
                name: group(**{one.name: values[one.name] for one in fields(group)})
                for name, group in groups.items()
            }
        )

    flags = [flag for group in groups.values() for flag in _list_flags(group)]
    if len({flag.name for flag in flags}) < len(flags):
        raise TypeError(f"{command.__name__} has two flags of one name")
    # Typer reads the signature, which is how inspect lets a wrapper show another than its own.
    run.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    return run


def _list_flags(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
            annotation=hints[one.name],
        )
        for one in fields(group)
    ]
