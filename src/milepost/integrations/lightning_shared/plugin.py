"""What a `CheckpointIO` of Lightning does with Milepost: one process saves, each process loads all of it."""

from typing import Any

import milepost
from milepost.background.engine import Background
from milepost.comm import TIMEOUT_S
from milepost.integrations.lightning_shared.parts import device_of
from milepost.integrations.lightning_shared.reading import Trusted, read_state, to_device
from milepost.integrations.lightning_shared.saves import TrainerSaves, clear_the_way, place_of, place_to_read
from milepost.saving.options import SaveSettings


class WholeCheckpoints:
    """The methods of a `CheckpointIO`, for whichever of Lightning's packages it is."""

    def __init__(
        self,
        *,
        background: Background | None = None,
        save_timeout_s: float = TIMEOUT_S,
        save_options: SaveSettings | None = None,
    ) -> None:
        # The strategy calls it on rank 0 only, so this process saves alone.
        self._saves = TrainerSaves(background, milepost.Solo(), save_timeout_s, save_options)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save what the trainer dumped; or begin to, in the background."""
        if storage_options is not None:
            raise milepost.InvalidRequest(
                f"{type(self).__name__} has no storage_options: pass the options of milepost.save as save_options"
            )
        where = place_of(path)
        clear_the_way(where)
        self._saves.save(checkpoint, where)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as the trainer dumped it, whoever saved it, on the CPU or the device of `map_location`."""
        self._saves.join()
        options = self._saves.options
        pickles = weights_only is False or options.get("allow_pickle", False)
        state = read_state(place_to_read(path), Trusted(tuple(options.get("types", ())), pickles))
        if map_location is not None:
            to_device(state, device_of(map_location))
        return state

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of Milepost, once what replaces it is committed."""
        self._saves.remove(path)

    def teardown(self) -> None:
        """Wait for a save in the background, and raise its error."""
        self._saves.close()
