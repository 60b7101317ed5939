"""Which spelling of keys a checkpoint has; here the planner finds out by itself, so these stay as they are."""

_derived_version: str | None = None
_act_like_version: str | None = None
