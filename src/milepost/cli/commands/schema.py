"""`milepost schema`."""

import sys

import click
import msgspec

from milepost.cli.app import COMMANDS, milepost
from milepost.cli.command import RecordCommand
from milepost.cli.command import command as make_command
from milepost.cli.complete import complete_names
from milepost.cli.schema import schema_of
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.errors import InvalidRequest


@make_command()
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=complete_names(COMMANDS))
@click.pass_context
def command(ctx: click.Context, session: Session, name: str | None) -> Status:
    """Print the JSON schema of a command's output.

    Without COMMAND: an object with the schemas of all commands. JSON Schema, draft 2020-12.
    """
    del session
    known = {one: milepost.get_command(ctx, one) for one in ([name] if name else COMMANDS)}
    schemas = {
        one: schema_of(found) for one, found in known.items() if isinstance(found, RecordCommand) and found.records
    }
    if name and name not in schemas:
        raise InvalidRequest(f"{name!r} is no command with --json; those are the ones of `milepost --help`")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(schemas[name] if name else schemas)).decode() + "\n")
    return Status.FINE
