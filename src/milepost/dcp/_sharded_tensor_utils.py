"""ShardedTensors that wrap others."""

from milepost.dcp._engine.lent import lend
from milepost.planning import default

_flatten_sharded_tensors = default.flatten_sharded_tensors

lend(__name__)
