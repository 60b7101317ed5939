"""`milepost completion`."""

import sys

import click

from milepost.cli.app import COMPLETE_VARIABLE, milepost
from milepost.cli.command import command as make_command
from milepost.cli.session import Session
from milepost.cli.statuses import Status


@make_command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(session: Session, shell: str) -> Status:
    """Print a script that completes commands.

    \b
    bash:  milepost completion bash >> ~/.bashrc
    zsh:   milepost completion zsh >> ~/.zshrc
    fish:  milepost completion fish > ~/.config/fish/completions/milepost.fish

    Completes commands, options, paths, and the keys of a checkpoint after `milepost show PATH`.
    """  # noqa: D301  # a real backspace, with which click keeps lines as they are
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    del session
    made = get_completion_class(shell)
    assert made is not None
    sys.stdout.write(made(milepost, {}, "milepost", COMPLETE_VARIABLE).source() + "\n")
    return Status.FINE
