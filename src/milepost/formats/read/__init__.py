"""Other formats, read as checkpoints."""
