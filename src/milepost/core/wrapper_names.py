"""The names that wrappers of modules add to keys. Pure."""

WRAPPER_STEPS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, DDP, FSDP1 and activation checkpoints call the module inside."""


def without_wrappers(key: str) -> str:
    """A key without such steps, whatever they stand for in it: to see whether two keys differ by nothing else."""
    return ".".join(step for step in key.split(".") if step not in WRAPPER_STEPS)
