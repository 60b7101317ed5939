"""The process that writes a checkpoint beside the trainer."""
