"""Staging: copies of a state that can be written while training goes on."""

from milepost.background.staging.packing import Slot
from milepost.background.staging.snapshot import Owned, Stager, Staging, Way

__all__ = ["Owned", "Slot", "Stager", "Staging", "Way"]
