"""Loading: a checkpoint goes back into a state. `pipeline.py` reads from top to bottom."""
