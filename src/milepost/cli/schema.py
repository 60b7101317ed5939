"""The JSON schemas of what commands print, made from their records."""

from typing import Any

import msgspec

from milepost.cli.command import RecordCommand

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(command: RecordCommand) -> dict[str, Any]:
    """The schema of a command's `--json`: that of its record, or of one of them where it has several."""
    found, parts = msgspec.json.schema_components(command.records, ref_template="#/$defs/{name}")
    body = found[0] if len(found) == 1 else {"anyOf": list(found)}
    return {"$schema": DIALECT, "title": f"milepost {command.name} --json", **body, "$defs": parts}
