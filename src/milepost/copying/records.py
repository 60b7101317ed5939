"""What a copy did, as records."""

from typing import Literal

import msgspec

CopyState = Literal["copied", "there", "planned", "unfinished", "removed", "damaged", "unreadable"]
"""`there`: the same was at the target already. `planned`: it would be copied. The others say why a step was not."""


class CopiedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `generation`: at the target, where it was copied. `data_bytes`, `files`: as far as known."""

    name: str
    step: int | None
    state: CopyState
    url: str
    reason: str = ""
    generation: int = 0
    data_bytes: int | None = None
    files: int | None = None
    seconds: float = 0.0


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy did, oldest step first; one entry for a checkpoint. `copied_bytes`: the data that was copied."""

    source: str
    target: str
    kind: Literal["checkpoint", "run"]
    steps: tuple[CopiedStep, ...]
    copied_bytes: int
    seconds: float
