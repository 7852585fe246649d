"""The `pdserve` command line."""

import sys
from typing import Annotated

import typer

from launcher.commands.autoscale import autoscale
from launcher.commands.demo import demo
from launcher.commands.demo_autoscale import demo_autoscale
from launcher.commands.explain import explain
from launcher.commands.flip import flip
from launcher.commands.generate import generate
from launcher.commands.plan import plan
from launcher.commands.profile import profile
from launcher.commands.roles import register_roles
from launcher.commands.scale import scale
from launcher.commands.serve import serve
from launcher.commands.status import status
from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import tell_by_flags
from pdserve.errors import ConfigError, PdserveError
from pdserve.version import VERSION

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """Assembles the commands."""
    app = typer.Typer(
        name="pdserve",
        help="Serves language models with prefill and decode in two pools.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    # Every option is also a variable: --max-num-seqs is PDSERVE_MAX_NUM_SEQS for every command.
    settings = {"auto_envvar_prefix": "PDSERVE", "show_default": True}
    for command in (
        serve,
        generate,
        status,
        explain,
        scale,
        flip,
        autoscale,
        plan,
        profile,
        demo,
        demo_autoscale,
    ):
        app.command(context_settings=settings)(command)
    register_roles(app)
    return app


def main() -> None:
    """Runs the command in `sys.argv` and ends the process with its status."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: list[str]) -> int:
    """Runs one command; what the user can mend becomes one line on stderr and status 2."""
    try:
        result = make_app()(argv, prog_name="pdserve", standalone_mode=False)
    except typer.TyperException as error:
        _write_error(error.format_message())
        return EXIT_USAGE
    except ConfigError as error:
        _write_error(tell_by_flags(error, ClusterConfig))
        return EXIT_USAGE
    except PdserveError as error:
        _write_error(str(error))
        return EXIT_FAILURE
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"pdserve {VERSION}")
        raise typer.Exit(0)


def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _write_error(text: str) -> None:
    sys.stderr.write(f"pdserve: {' '.join(text.split())}\n")


if __name__ == "__main__":
    main()
