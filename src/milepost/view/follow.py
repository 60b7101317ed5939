"""A run that goes on, looked at again and again: what is known of it, as a page, and what is wrong with the place."""

import time
from collections.abc import Callable

from milepost.errors import CheckpointError, CheckpointNotFound, InvalidRequest
from milepost.inspection.place import place_at
from milepost.inspection.runs import PlaceSummary, SeenSteps, look_at
from milepost.store import Location
from milepost.view.collect import Collection, ViewOptions
from milepost.view.record import Page

LOOK_EVERY_S = 1.0
_REST = 8
"""How many times as long as a look the pause after it is, at least."""


class Followed:
    """A place that is followed. It may be empty at first, may vanish, and may come back.

    `page`: what was seen last. `number`: how many different pages there were. `trouble`: why the last look failed.
    """

    def __init__(self, place: Location, wanted: ViewOptions) -> None:
        self.store = place_at(place)
        self._seen = SeenSteps()
        self._collection = Collection(self.store, wanted)
        self._looked = PlaceSummary(url=self.store.url, kind="nothing")
        self.page: Page = self._collection.page(self._looked)
        self.number, self.trouble = 1, ""

    def look(self) -> bool:
        """Look again. Whether the page or the trouble is another one now. Raises only for faults of ours."""
        before = self.number, self.trouble
        try:
            looked = look_at(self.store, self._seen)
            self._renew(looked)
            self.trouble = ""
        except InvalidRequest:
            raise
        except (CheckpointError, OSError) as error:
            self.trouble = str(error) or type(error).__name__
        return before != (self.number, self.trouble)

    def _renew(self, looked: PlaceSummary) -> None:
        if looked.kind == "nothing":
            if self._looked.kind != "nothing":
                raise CheckpointNotFound(f"{self.store.url} is not there any more.")
            return
        if _without_ages(looked) == _without_ages(self._looked):
            return
        self._collection.renew(looked)
        self.page, self._looked = self._collection.page(looked), looked
        self.number += 1


def follow(followed: Followed, show: Callable[[Followed], None], is_ended: Callable[[float], bool]) -> None:
    """Look until it is ended, and show what is new. `is_ended(seconds)` waits that long, or until it is.

    A look that takes long is followed by a longer pause: most of the time the place is left alone.
    """
    pause_s = LOOK_EVERY_S
    while not is_ended(pause_s):
        began = time.monotonic()
        if followed.look():
            show(followed)
        pause_s = max(LOOK_EVERY_S, _REST * (time.monotonic() - began))


def _without_ages(looked: PlaceSummary) -> tuple[object, ...]:
    told = [(one.name, one.state, one.reason, one.generation, one.kept, one.verified) for one in looked.steps]
    return looked.kind, told, [(one.created, one.file_bytes) for one in looked.steps]
