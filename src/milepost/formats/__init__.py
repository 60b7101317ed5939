"""Other formats: what they hold, read as a checkpoint or written from one."""
