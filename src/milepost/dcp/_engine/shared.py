"""What the functions of this package share, since they have no object of their own."""

from milepost.background.shared import SharedSavers
from milepost.dcp._engine.turns import Turns

SAVERS = SharedSavers()
"""The savers behind `async_save`."""
TURNS = Turns()
"""The order of saves that use the same planner or storage."""
