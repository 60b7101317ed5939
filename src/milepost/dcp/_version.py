"""Which spelling of keys a checkpoint has; here the planner finds out by itself, so this stays as it is."""

_derived_version: str | None = None
