"""Staging: copies of a state that can be written while training goes on."""

from milepost.staging.packing import Slot
from milepost.staging.staging import Owned, Stager, Staging, Way

__all__ = ["Owned", "Slot", "Stager", "Staging", "Way"]
