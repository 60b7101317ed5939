"""Data loaders that go on, to the sample, on another number of ranks: torchdata and Hugging Face streams."""

from milepost.integrations.data.loader import Loader
from milepost.integrations.data.streams import ShardStream, split_dataset_by_node

__all__ = ["Loader", "ShardStream", "split_dataset_by_node"]
