"""The rule that a run is pruned by, as its steps tell it."""

from typing import Any

from milepost.core.manifest import Manifest
from milepost.errors import CheckpointError, InvalidRequest
from milepost.state.values import Codec
from milepost.steps.retention import Rule

RETENTION = "retention"
"""The key in a checkpoint's metadata under which the rule stands that its run is pruned by."""


def rule_of(manifest: Manifest | None) -> Rule | None:
    """The rule that a step was saved under, if its metadata tells one. Does not decode the rest of the metadata."""
    try:
        spelled = {name: value for name, value in manifest.metadata["dict"] if isinstance(name, str)}  # type: ignore[union-attr]
        told = Codec().decode(spelled[RETENTION], RETENTION)
        rule = Rule(**{name: told[name] for name in Rule.__slots__ if name in told})
    except (CheckpointError, InvalidRequest, TypeError, ValueError, KeyError, AttributeError):
        return None
    return rule


def told_rule(rule: Rule | None) -> dict[str, Any] | None:
    """The rule as JSON, without what it leaves open."""
    if rule is None:
        return None
    told = {name: getattr(rule, name) for name in Rule.__slots__}
    return {name: value for name, value in told.items() if value is not None and (name != "mode" or rule.best)}
