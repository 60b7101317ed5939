"""How a command is made: `@command(Record)` around a function that gets the session first, then its own options."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import click
import msgspec

from milepost.cli.output import warnings_shown
from milepost.cli.session import Session, told_json, told_to_debug
from milepost.cli.statuses import Status

P = ParamSpec("P")


class RecordCommand(click.Command):
    """A command that makes one record: it is printed as text, or as JSON with `--json`."""

    def __init__(self, *args: Any, records: tuple[type[msgspec.Struct], ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.records = records

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with warnings of the library as remarks on stderr."""
        with warnings_shown():
            return super().invoke(ctx)


def command(
    *records: type[msgspec.Struct],
) -> Callable[[Callable[Concatenate[Session, P], Status]], RecordCommand]:
    """Make a command of a function. Its docstring is the help. `records`: what `--json` prints, one of them."""

    def make(function: Callable[Concatenate[Session, P], Status]) -> RecordCommand:
        ours = click.option("--debug", is_flag=True, expose_value=False, callback=told_to_debug, help=_DEBUG)(function)
        if records:
            ours = click.option("--json", is_flag=True, expose_value=False, callback=told_json, help=_JSON)(ours)
        name = function.__module__.rpartition(".")[2]
        made = click.command(name, cls=RecordCommand, records=records)(click.pass_obj(ours))
        made.params.sort(key=lambda param: param.name in _EVERYWHERE)  # last in the help, as `--help` is
        return made

    return make


_EVERYWHERE = ("json", "debug")
_DEBUG = "Show the traceback of an error."
_JSON = "Print JSON; see `milepost schema`."
