"""The commit: how a checkpoint comes into existence, is found, and goes."""
