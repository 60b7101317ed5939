"""Saves that go on while training does. `saver.AsyncSaver` is what users call, `pending.PendingSave` what they get."""
