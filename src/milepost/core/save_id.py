"""Save ids: the names of attempts to write a checkpoint. No two attempts have the same one. Pure."""

import re

# Not \d, which means the digits of every script.
_SAVE_ID = re.compile(r"[0-9]{8}-[0-9a-f]{8,32}")


def make_save_id(generation: int, token: str) -> str:
    """The name of one attempt to write this generation. Later saves see from it when the attempt has become void."""
    return f"{generation:08d}-{token}"


def intended_generation(save_id: str) -> int | None:
    """The generation that a save id aims at, or None for text that is no save id."""
    return int(save_id[:8]) if _SAVE_ID.fullmatch(save_id) else None
