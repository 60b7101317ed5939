"""Saving: a state becomes a checkpoint. `pipeline.py` reads from top to bottom."""
