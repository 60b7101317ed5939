"""Objects that give their state as a dict and take it back."""

from typing import TypeVar

from milepost.state.take_apart import Stateful

__all__ = ["Stateful", "StatefulT"]

StatefulT = TypeVar("StatefulT", bound=Stateful)
