"""Saves that go on while training does."""

from milepost.background.pending import PendingSave
from milepost.background.saver import Background, BackgroundSaver, WhenBusy, Work

__all__ = ["Background", "BackgroundSaver", "PendingSave", "WhenBusy", "Work"]
