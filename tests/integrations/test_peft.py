"""peft: adapters trained on ranks, saved by Milepost, read by peft itself, and back."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import milepost
import milepost.store.local
from tests.ranks import spawn, spawn_outcomes

peft = pytest.importorskip("peft")
ADAPTER = "adapter_model.safetensors"
EXAMPLE = Path(__file__).parents[2] / "examples" / "peft_adapter.py"


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def lora():
    return peft.LoraConfig(r=4, target_modules=["up"], modules_to_save=["down"], init_lora_weights=False)


def trainer(sharded):
    torch.manual_seed(1)
    model = peft.get_peft_model(Base(), lora())
    if sharded:
        fully_shard(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=0.05)


def train(model, optimizer, steps):
    """The losses of some steps; every rank has the same batch, so the number of ranks changes nothing."""
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        batch = torch.randn(8, 6)
        loss = (model(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model, optimizer):
    return {"adapter": peft.get_peft_model_state_dict(model), "optim": optimizer}


def first_run(rank, folder):
    model, optimizer = trainer(sharded=True)
    losses = train(model, optimizer, range(3))
    milepost.save(state_of(model, optimizer), folder / "run")
    live = peft.get_peft_model_state_dict(model)
    milepost.export_safetensors(live, folder / "live", file_name=ADAPTER)
    trained = {key: value.full_tensor() for key, value in live.items()}
    return losses + train(model, optimizer, range(3, 6)), trained


def killed(rank, folder):
    model, optimizer = trainer(sharded=True)
    if rank == 0:
        milepost.store.local.LocalStore.create = lambda *_: os._exit(9)  # the manifest is never written
    milepost.save(state_of(model, optimizer), folder / "run", timeout_s=5)


def loss_of(model):
    torch.manual_seed(7)
    batch = torch.randn(8, 6)
    return (model(batch) - batch.flip(1)).square().mean().item()


def resumed(rank, folder):
    """The losses after a resume, and the loss with the adapter that peft wrote."""
    model, optimizer = trainer(sharded=True)
    milepost.load(state_of(model, optimizer), folder / "run")
    losses = train(model, optimizer, range(3, 6))
    milepost.load(peft.get_peft_model_state_dict(model), folder / "theirs")
    return losses, loss_of(model)


def convert(folder):
    def only_the_adapter(key):
        return key.removeprefix("adapter.") if key.startswith("adapter.") else None

    milepost.convert(folder / "run", folder / "out", "safetensors", rename=only_the_adapter, file_name=ADAPTER)
    lora().save_pretrained(folder / "out")
    return peft.PeftModel.from_pretrained(Base(), folder / "out")


def test_an_adapter_goes_from_ranks_to_peft_and_back(tmp_path):
    (losses, trained), _ = spawn(2, first_run, tmp_path)
    outcomes = spawn_outcomes(2, killed, tmp_path)
    assert not any(outcome and outcome[0] for outcome in outcomes)

    model = convert(tmp_path)
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", ADAPTER]
    assert sorted(os.listdir(tmp_path / "live")) == [ADAPTER]
    adapter, live = peft.get_peft_model_state_dict(model), milepost.open(tmp_path / "live")
    assert set(adapter) == set(live) == set(trained)
    for key, value in adapter.items():
        assert torch.equal(value, trained[key]), key
        assert torch.equal(value, live[key].read()), key

    with torch.no_grad():
        for value in adapter.values():
            value.mul_(1.5)
    model.save_pretrained(tmp_path / "theirs")
    for after, loss in spawn(3, resumed, tmp_path):
        assert after == pytest.approx(losses[3:], rel=1e-5)
        assert loss == pytest.approx(loss_of(model), rel=1e-5)


def test_an_adapter_in_several_files_has_an_index_of_its_name(tmp_path):
    model = peft.get_peft_model(Base(), lora())
    milepost.save({"adapter": peft.get_peft_model_state_dict(model)}, tmp_path / "run")
    base = {"weight": torch.ones(3)}
    milepost.export_safetensors(base, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / "base.safetensors")
    milepost.convert(
        *(tmp_path / "run", tmp_path / "out", "safetensors"),
        rename=lambda key: key.removeprefix("adapter."),
        file_name=ADAPTER,
        max_shard_bytes=200,
    )
    names = sorted(os.listdir(tmp_path / "out"))
    assert "adapter_model.safetensors.index.json" in names
    assert "adapter_model-00001-of-00004.safetensors" in names
    assert "base.safetensors" in names, "files of other names stay"
    assert set(milepost.open(tmp_path / "out")) == set(peft.get_peft_model_state_dict(model))
    (tmp_path / "out" / "adapter_model.safetensors.index.json").unlink()
    with pytest.raises(milepost.CheckpointNotFound, match="index"):
        milepost.open(tmp_path / "out")


def test_the_example_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("peft_adapter", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(str(tmp_path))
    assert f"adapter in {tmp_path}/adapter" in capsys.readouterr().out
