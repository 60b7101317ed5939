"""Saves that go on while training does."""

from milepost.background.pending import PendingSave
from milepost.background.saver import Background, BackgroundSaver, WhenBusy, Work, finish

__all__ = ["Background", "BackgroundSaver", "PendingSave", "WhenBusy", "Work", "finish"]
