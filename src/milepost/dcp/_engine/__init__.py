"""The engine behind the mirror of `torch.distributed.checkpoint`."""
