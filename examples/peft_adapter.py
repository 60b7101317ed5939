"""A LoRA adapter: trained, saved with its optimizer, resumed, and written for peft.

python examples/peft_adapter.py FOLDER        on more ranks: torchrun --nproc-per-node 2 examples/peft_adapter.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import fully_shard

import milepost


class Base(nn.Module):
    """A tiny base model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Forward."""
        return self.down(torch.relu(self.up(x)))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its adapter, sharded over the ranks of the job, and the optimizer of the adapter."""
    torch.manual_seed(0)
    model = get_peft_model(Base(), LoraConfig(r=4, target_modules=["up", "down"]))
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train, and give the last loss."""
    loss = torch.zeros(())
    for step in range(steps):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(folder: str) -> None:
    """Train, save, resume, convert."""
    model, optimizer = build()
    train(model, optimizer, 5)
    # peft names the adapter's tensors as its own files do. They are the model's memory, not copies.
    milepost.save({"adapter": get_peft_model_state_dict(model), "optim": optimizer, "step": 5}, f"{folder}/run")

    model, optimizer = build()
    state = {"adapter": get_peft_model_state_dict(model), "optim": optimizer, "step": 0}
    milepost.load(state, f"{folder}/run")
    loss = train(model, optimizer, 5)

    adapter = get_peft_model_state_dict(model)
    milepost.export_safetensors(adapter, f"{folder}/adapter", file_name="adapter_model.safetensors", overwrite=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(f"{folder}/adapter")  # adapter_config.json
        torch.manual_seed(0)
        PeftModel.from_pretrained(Base(), f"{folder}/adapter")
        print(f"loss {loss:.3f}, adapter in {Path(folder) / 'adapter'}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    main(sys.argv[1] if len(sys.argv) > 1 else "lora-run")
    if dist.is_initialized():
        dist.destroy_process_group()
