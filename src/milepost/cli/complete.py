"""What a shell offers for an argument: the keys of a checkpoint that is already named, the steps of a run."""

from typing import Any

import click
from click.shell_completion import CompletionItem

MOST_OFFERED = 200


def complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The keys of the checkpoint at the path that stands before, or of the newest step there; none if unreadable."""
    del param
    path = ctx.params.get("path")
    if not isinstance(path, str):
        return []
    from milepost.checkpoint import open_checkpoint  # noqa: PLC0415  # only where a shell asks
    from milepost.cli.escape import shown  # noqa: PLC0415
    from milepost.inspection.place import place_at  # noqa: PLC0415
    from milepost.inspection.runs import newest_step  # noqa: PLC0415

    try:
        place = place_at(path)
        found = newest_step(place, or_unhealthy=True)
        with open_checkpoint(place if found is None else found.place) as checkpoint:
            keys = [key for key in map(shown, checkpoint) if key.startswith(incomplete)]
    except Exception:  # noqa: BLE001  # a shell that completes shows no errors
        return []
    return [CompletionItem(key) for key in keys[:MOST_OFFERED]]


def complete_names(names: Any) -> Any:
    """Completion from a fixed list."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        del ctx, param
        return [name for name in names if name.startswith(incomplete)]

    return complete
