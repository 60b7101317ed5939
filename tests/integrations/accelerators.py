"""A tiny job with Accelerate, for real ranks: the model drops out and the data is shuffled, so all state counts."""

import contextlib
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

KINDS = ("plain", "fsdp1", "fsdp2")
BATCHES = 6


class Counter:
    """An object that is registered for checkpointing; its state grows."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


class Job:
    """Everything that a training script has."""

    def __init__(self, kind, project=None, *, drop=0.0, seed=1, **configuration):
        if dist.is_initialized():
            world, rank = str(dist.get_world_size()), str(dist.get_rank())
            os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        plugin = None
        if kind.startswith("fsdp"):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(kind[-1]),
                reshard_after_forward=True if kind == "fsdp2" else "FULL_SHARD",
                use_orig_params=True if kind == "fsdp1" else None,
                state_dict_type="SHARDED_STATE_DICT",
            )
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed, split_batches=True),
            project_config=ProjectConfiguration(project_dir=project, **configuration) if project else None,
        )
        if plugin is not None:  # Accelerate uses FSDP with accelerators only; torch's works on the CPU too
            self.accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Dropout(drop), torch.nn.Linear(12, 3))
        if kind == "fsdp1":  # Accelerate's own call says device_id="cpu:0", which torch refuses
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        set_seed(seed, device_specific=True)
        data = TensorDataset(torch.arange(36 * BATCHES).view(-1, 6).sin())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, DataLoader(data, 6, shuffle=True), schedule
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, first, last, at_step=None):
        """Train steps first+1 to last, over epochs; gives the loss of each, over all ranks."""
        losses = []
        step = first
        while step < last:
            epoch, within = divmod(step, BATCHES)
            self.loader.set_epoch(epoch)
            loader = skip_first_batches(self.loader, within) if within else self.loader
            for (batch,) in loader:
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                step += 1
                self.counter.seen.append(step)
                losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
                if at_step is not None:
                    at_step(step)
                if step == last:
                    break
        return losses


@contextlib.contextmanager
def one_process():
    """A job without other ranks, which leaves Accelerate's global state as it was."""
    try:
        yield
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
