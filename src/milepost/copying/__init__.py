"""Copying checkpoints and runs from any kind of place to any other: verified on the way, and committed as a save is."""
