"""`milepost`: the group of commands. A command's module is imported when it runs, and no sooner.

Click and not Typer: Typer is made of click, and takes as long again to import. `milepost --help` needs click and this
file only.
"""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from milepost.cli.session import Session, told_to_debug
from milepost.cli.statuses import Status, one_line, output_told, status_of
from milepost.version import __version__

COMMANDS = {
    "ls": "List the steps of a run, or one checkpoint.",
    "show": "Show what a checkpoint holds, or one entry of it.",
    "verify": "Read every byte, and name what is damaged.",
    "diff": "Say what differs between two checkpoints.",
    "stats": "Show the statistics of tensors: NaN, Inf, range, mean, rms.",
    "explain": "Say what a load on other ranks would read.",
    "convert": "Write a checkpoint in another format.",
    "cp": "Copy a checkpoint, or the steps of a run.",
    "prune": "Remove old steps of a run.",
    "view": "Show a run or a checkpoint as one page for the browser.",
    "doctor": "Check whether a place is fit for checkpoints.",
    "bench": "Measure what a place gives, raw beside Milepost.",
    "schema": "Print the JSON schema of a command's output.",
    "completion": "Print a script that completes commands.",
}
"""The commands in the order of `--help`, each with its first line. The first line of its own help is the same."""


COMPLETE_VARIABLE = "_MILEPOST_COMPLETE"
"""A shell sets it when it asks for completions."""


class Commands(click.Group):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, those of daily use first."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported now."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"milepost.cli.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, which imports none of them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"milepost {__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version)
@click.option("--debug", is_flag=True, is_eager=True, expose_value=False, callback=told_to_debug, hidden=True)
@click.pass_context
def milepost(ctx: click.Context) -> int:
    """Look into checkpoints; compare, check and copy them; tidy runs up.

    A place is a path or a URL, and holds a checkpoint of Milepost, of torch.distributed.checkpoint, of torch.save, or
    safetensors files. Commands take --json, and --debug for the traceback of an error.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
    return Status.USAGE  # of `milepost` alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status. An error is one line on stderr."""
    _prepare_streams()
    with _buffered_stdout():
        return _ended(arguments)


def _ended(arguments: Sequence[str] | None) -> int:
    session = Session()
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments), session)
        sys.stdout.flush()
        return status
    except click.ClickException as error:
        session.complain(error, _advised(error))
        return Status.USAGE
    except (KeyboardInterrupt, click.Abort):
        with contextlib.suppress(OSError):
            sys.stderr.write("\n")
        return Status.INTERRUPTED
    except BrokenPipeError:
        return Status.CLOSED_PIPE  # nobody reads on
    except Exception as error:  # noqa: BLE001  # an end that nobody foresaw is told in one line, too
        status = status_of(error)
        fault = f"a fault of Milepost, please report it: {type(error).__name__}: " if status is Status.FAULT else ""
        session.complain(error, fault + one_line(error))
        return status
    finally:
        _forget_unwritten()


def _prepare_streams() -> None:
    """Make every stream one that can be used: a caller may have closed some."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows few letters still gets all text


@contextlib.contextmanager
def _buffered_stdout() -> Iterator[None]:
    """Inside, errors of stdout name stdout, whichever code writes; and it has a buffer, with PYTHONUNBUFFERED too.

    Without a buffer, what is written only in part is no error.
    """
    before = sys.stdout
    buffer = getattr(before, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, io.FileIO):
        yield
        return
    before.flush()
    ours = io.BufferedWriter(_Output(raw))
    sys.stdout = io.TextIOWrapper(ours, before.encoding, "backslashreplace", line_buffering=before.isatty())
    try:
        yield
    finally:
        sys.stdout.detach()
        ours.detach()
        sys.stdout = before


class _Output(io.RawIOBase):
    """Where stdout goes. Its errors name it: the full disk may not be the one with the checkpoints."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw

    def write(self, data: Any) -> int | None:
        with output_told():
            return self._raw.write(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()


def _forget_unwritten() -> None:
    """What could not be written must not raise again while Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: list[str], session: Session) -> int:
    if COMPLETE_VARIABLE in os.environ:
        from click.shell_completion import shell_complete  # noqa: PLC0415  # only where a shell asks

        return shell_complete(milepost, {"obj": session}, "milepost", COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
    try:
        with milepost.make_context("milepost", arguments, obj=session) as ctx:
            return int(milepost.invoke(ctx) or Status.FINE)
    except click.exceptions.Exit as ended:
        return ended.exit_code


def _advised(error: click.ClickException) -> str:
    """A wrong use in one line, with where to read how it is used."""
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "milepost"
    text = one_line(Exception(error.format_message()))
    return f"{text}{'' if text.endswith(('.', '?')) else '.'} See: {where} --help"
