"""Many checkpoints of one run: steps, retention, resume, preemption."""
