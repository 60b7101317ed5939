"""A tiny Trainer of Transformers, for real ranks."""

import os

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from milepost.integrations.transformers import MilepostTrainer


class StopAt(TrainerCallback):
    """Ends the training as Ctrl-C does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make(folder, kind="plain", *, drop=0.0, make_trainer=MilepostTrainer, made_with=None, **arguments):
    """A trainer; with other seeds each time, so that only a resumed one goes on as before."""
    if dist.is_initialized():
        world, rank = str(dist.get_world_size()), str(dist.get_rank())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    torch.manual_seed(0)
    dropout = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=12, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **dropout
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (24, 8))]
    given = TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "remove_unused_columns": False,  # FSDP1 hides the signature of the model
            "per_device_train_batch_size": 6,
            "per_device_eval_batch_size": 6,
            "accelerator_config": {"split_batches": True},
            "max_steps": 8,
            "save_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "report_to": [],
            "disable_tqdm": True,
            "save_total_limit": 2,
            **arguments,
        },
    )
    trainer = make_trainer(
        model=GPT2LMHeadModel(config), args=given, train_dataset=data, eval_dataset=data[:6], **(made_with or {})
    )
    if kind == "fsdp1":  # Accelerate's own call says device_id="cpu:0", which torch refuses
        cut = FullyShardedDataParallel(trainer.model, device_id=torch.device("cpu"), use_orig_params=True)
        trainer.model = trainer.model_wrapped = cut
    if kind != "plain":  # Accelerate uses FSDP with accelerators only; torch's works on the CPU too
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]), state_dict_type="SHARDED_STATE_DICT")
        state = trainer.accelerator.state
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin, trainer.is_fsdp_enabled = plugin, True
    return trainer


def losses(trainer):
    """The loss of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
