"""ShardedTensors that wrap others."""

from milepost.planning import default

_flatten_sharded_tensors = default.flatten_sharded_tensors
