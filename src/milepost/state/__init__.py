"""What a user passes: how a state is taken apart, its tensors, and the codec of its values."""
