"""Notices that tensors change in place while they are saved."""

from collections.abc import Callable, Mapping

import torch

from milepost.errors import InvalidState
from milepost.state.tensors import LocalTensor

_SHOWN = 5


class Versions:
    """The versions of tensors when a save began to read them. Torch counts one up with every change in place.

    Changes that go past torch are not seen: through numpy, through `.data`, by a CUDA graph that is replayed.
    """

    def __init__(
        self, tensors: Mapping[str, LocalTensor], counts: Callable[[torch.Tensor], bool] = lambda _: True
    ) -> None:
        self._seen = [
            (key, part.data, _version(part.data))
            for key, local in tensors.items()
            for part in local.parts
            if counts(part.data)
        ]

    def keep(self, counts: Callable[[torch.Tensor], bool]) -> None:
        """Forget the tensors that no longer count."""
        self._seen = [one for one in self._seen if counts(one[1])]

    def check(self) -> None:
        """Raises InvalidState, with the keys, if any of them changed."""
        changed = sorted({key for key, data, version in self._seen if _version(data) != version})
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise InvalidState(
                f"{', '.join(map(repr, changed[:_SHOWN]))}{more} changed while they were being saved, so nothing is "
                'committed. Change the state when `save` has returned; with stage="overlap", after `wait_staged()`, '
                "or pass `optimizer=` with every optimizer that changes it."
            )


def _version(data: object) -> int | None:
    """The version of a tensor. None for one that has none, or no elements, and for data that is made when written."""
    if not isinstance(data, torch.Tensor) or data.is_inference() or not data.numel():
        return None
    return data._version  # noqa: SLF001  # documented, in spite of its name
