import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from launcher.commands.serve import serve
from launcher.options.group import with_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    name: Annotated[str, typer.Argument(help="Of the thing.")]
    width_m: Annotated[float, typer.Option(min=0.0, help="Across.")] = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Colours:
    colour: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None
    is_bright: Annotated[bool, typer.Option("--bright")] = False


def run(*argv: str) -> tuple[int, str, tuple[Sizes, Colours] | None]:
    seen: list[tuple[Sizes, Colours]] = []

    @with_options
    def paint(sizes: Sizes, colours: Colours) -> int:
        """Paint a thing."""
        seen.append((sizes, colours))
        return 0

    app = typer.Typer(rich_markup_mode=None)
    app.command()(paint)
    result = CliRunner().invoke(app, list(argv))
    return result.exit_code, result.output, seen[0] if seen else None


def test_fields_of_all_groups_are_flags_and_come_back_in_their_groups() -> None:
    status, _, groups = run("door", "--width-m", "2", "--colour", "red", "--colour", "blue")
    assert status == 0
    assert groups == (
        Sizes(name="door", width_m=2.0),
        Colours(colour=["red", "blue"], is_bright=False),
    )


def test_a_flag_that_is_not_given_has_the_default_of_its_field() -> None:
    assert run("door") == (0, "", (Sizes(name="door"), Colours()))


def test_limits_and_required_fields_are_checked_before_the_command_runs() -> None:
    status, text, groups = run("door", "--width-m", "-1")
    assert (status, groups) == (2, None)
    assert "width-m" in text
    status, text, groups = run()
    assert (status, groups) == (2, None)
    assert "name" in text.lower()


def test_help_shows_the_command_s_words_and_those_of_each_field() -> None:
    _, text, _ = run("--help")
    for words in ("Paint a thing.", "Of the thing.", "Across.", "May be repeated.", "--bright"):
        assert words in text


def test_two_groups_with_a_field_of_one_name_are_refused() -> None:
    def paint(sizes: Sizes, more: Sizes) -> int:
        raise AssertionError

    with pytest.raises(TypeError, match="two flags of one name"):
        with_options(paint)


def test_every_flag_of_serve_says_what_it_is() -> None:
    for flag in inspect.signature(serve).parameters.values():
        (option,) = flag.annotation.__metadata__
        assert option.help, flag.name
