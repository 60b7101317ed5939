"""Whether a place is fit to hold checkpoints: what is checked, and what to do about what is wrong."""
