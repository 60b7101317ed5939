"""Other formats, written from checkpoints."""
