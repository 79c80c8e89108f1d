"""The command group `flashsmith`: which commands there are, and how one is loaded."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

_HELP = {"help_option_names": ["-h", "--help"]}
#: In the order of `flashsmith --help`. Each is a module beside this one, with `command` and `EXAMPLES`.
COMMANDS = ("tune", "generate", "compile", "emulate", "space", "bench", "show", "doctor", "cache")


class _Group(TyperGroup):
    """Loads a command's module when the command is named."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None


def application() -> Any:
    """The group, ready for `.main(args=...)`."""
    group = typer.Typer(
        cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, context_settings=_HELP
    )
    group.callback()(_root)
    return typer.main.get_command(group)


def load_command(name: str) -> Any:
    """The command called `name`, one of `COMMANDS`."""
    module = importlib.import_module(f"{__package__}.{name}")
    single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_HELP)
    examples = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES)
    single.command(name, epilog=examples)(_interruptible(module.command))
    return typer.main.get_command(single)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the option --verbose, ended by Ctrl-C with a word and exit code 130."""

    @functools.wraps(command)
    def run(*, verbose: bool, **options: Any) -> None:
        del verbose  # its callback has done the work
        try:
            command(**options)
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from None

    signature = inspect.signature(command, eval_str=True)
    extra = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__annotations__["verbose"] = Verbose
    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from flashsmith import __version__

        typer.echo(f"flashsmith {__version__}")
        raise typer.Exit


def _raise_log_level(wanted: bool) -> None:
    if wanted:
        logging.getLogger("flashsmith").setLevel(logging.INFO)


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what happens, to standard error.", callback=_raise_log_level)
]


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    verbose: Verbose = False,
) -> None:
    """FlashAttention kernels generated as readable CUDA C++, compiled at run time, tuned on the GPU at hand."""
