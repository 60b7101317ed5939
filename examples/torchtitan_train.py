"""torchtitan's Trainer with Milepost's checkpoints: a tiny Llama 3 on numbers, on GPUs or, for a first try, on CPUs.

    torchrun --nproc-per-node 2 examples/torchtitan_train.py runs/titan --steps 4
    torchrun --nproc-per-node 2 examples/torchtitan_train.py runs/titan --steps 8      goes on after step 4

`--override` shows the other way to get Milepost: torchtitan's own configuration, and an import on the command line.
"""

import argparse
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def allow_cpu() -> None:
    """Let torchtitan 0.3 run on CPUs, and on torch 2.13. Not needed with GPUs and the torch that torchtitan wants."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None
    if torch.accelerator.is_available():
        return
    device = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    device.set_device = device.reset_peak_memory_stats = device.empty_cache = lambda *_: None
    device.get_device_name, device.memory_stats = lambda *_: "CPU", lambda *_: {}
    device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    device.current_device, device.device_count = lambda: 0, lambda: 1
    real = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: device if name == "cpu" else real(name)
    # Kernels for GPUs, which need triton.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()


allow_cpu()

from torchtitan.components.checkpoint import CheckpointManager as TitanManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import OverrideConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from milepost.integrations.torchtitan import CheckpointManager  # noqa: E402

WORDS = 128


class NoTokenizer(BaseTokenizer):
    """The numbers are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """No tokens."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """No text."""
        return ""

    def get_vocab_size(self) -> int:
        """How many tokens there are."""
        return WORDS


class Numbers(torch.utils.data.IterableDataset[Any]):
    """Sequences that can be learnt, another share of them for each data-parallel rank."""

    def __init__(self, rank: int, world: int, length: int) -> None:
        self.rank, self.world, self.length, self.taken = rank, world, length, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            number = self.taken * self.world + self.rank
            self.taken += 1
            tokens = (torch.arange(self.length + 1) * (1 + number % 7) + number * number) % WORDS
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        """How many were taken."""
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on there."""
        self.taken = state_dict["taken"]


class NumbersLoader(ParallelAwareDataloader):
    """torchtitan's data loader, which keeps a position for each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """Nothing more to choose."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        numbers = Numbers(dp_rank, dp_world_size, seq_len)
        super().__init__(numbers, dp_rank, dp_world_size, batch_size=local_batch_size)


def tiny_llama() -> ModelSpec:
    """torchtitan's debug model, smaller, with attention that CPUs have."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = WORDS
    return spec


def make_config(folder: str, steps: int, checkpoint: Any, override: OverrideConfig | None = None) -> Trainer.Config:
    """A config function as torchtitan knows them. `checkpoint` is all that concerns Milepost."""
    return Trainer.Config(
        model_spec=tiny_llama(),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        hf_assets_path=folder,
        dump_folder=folder,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=2, seq_len=16, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        dataloader=NumbersLoader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        checkpoint=checkpoint,
        override=override or OverrideConfig(),
    )


def build(config: Trainer.Config) -> Trainer:
    """The trainer; gloo cannot scale while it sums, so FSDP sums first."""
    trainer = config.build()
    for part in trainer.model_parts if not torch.accelerator.is_available() else []:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer


def main() -> None:
    """Train, and go on from the newest whole step if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--override", action="store_true")
    arguments = parser.parse_args()
    fields = {"enable": True, "interval": 2, "keep_latest_k": 2, "last_save_model_only": False}
    if arguments.override:
        override = OverrideConfig(imports=["milepost.integrations.torchtitan.use_milepost"])
        config = make_config(arguments.folder, arguments.steps, TitanManager.Config(**fields), override)
    else:
        checkpoint = CheckpointManager.Config(**fields, async_mode="async_with_pinned_mem")
        config = make_config(arguments.folder, arguments.steps, checkpoint)
    init_logger()
    trainer = build(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
