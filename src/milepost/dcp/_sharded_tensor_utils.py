"""ShardedTensors that wrap others."""

from milepost import planning

_flatten_sharded_tensors = planning.flatten_sharded_tensors
