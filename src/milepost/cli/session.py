"""What one run of the command line knows: whether to write JSON, whether to show tracebacks, and the terminal."""

import contextlib
import sys
import traceback
from dataclasses import dataclass

import click

from milepost.core.printable import printable


@dataclass
class Session:
    """The options that every command has. Click hands it to the command as `obj`."""

    json: bool = False
    debug: bool = False

    def complain(self, error: BaseException, line: str) -> None:
        """Say in one line on stderr what went wrong; with `--debug` after the traceback."""
        with contextlib.suppress(OSError):  # the status tells, where nobody reads stderr
            if self.debug:
                trace = "".join(traceback.format_exception(error))
                sys.stderr.writelines(f"{printable(one)}\n" for one in trace.splitlines())
            sys.stderr.write(f"milepost: {line}\n")


def told_to_debug(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """The option `--debug`."""
    session = ctx.find_object(Session)
    if wanted and session is not None:
        session.debug = True


def told_json(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """The option `--json`."""
    session = ctx.find_object(Session)
    if wanted and session is not None:
        session.json = True
