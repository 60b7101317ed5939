"""Makes the checkpoints in `deepspeed/` with DeepSpeed itself, on two CPU ranks, and what its own tool reads from them.

    DS_BUILD_OPS=0 pip install deepspeed==0.19.8
    python tests/golden/make_deepspeed.py /tmp/made

They were written once, with torch 2.13, and are not written again. The scripts that DeepSpeed puts beside them are left
out. Stage 1 and 3 train in bfloat16, stage 2 in float32. The universal folder is made from stage 1.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

STAGES = {"zero1": (1, True), "zero2": (2, False), "zero3": (3, True)}


def train(rank, folder, stage, half, port):
    """Three steps of a model with two groups, a tied, a frozen and a buffer; then a save."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config |= {"bf16": {"enabled": True}} if half else {}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10), config=config
    )
    for _ in range(3):
        engine.backward(engine(torch.randint(0, 11, (2, 4))))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"step": 3, "note": "hello"})


def make_model():
    """Shapes that divide among no ranks."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(11, 7), nn.LayerNorm(7), nn.Linear(7, 5)
            self.tied = nn.Linear(7, 11, bias=False)
            self.tied.weight = self.embed.weight
            self.frozen = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
            self.register_buffer("seen", torch.arange(3.0))

        def forward(self, x):
            hidden = self.norm(self.embed(x))
            loss = self.head(hidden).float().pow(2).mean() + self.tied(hidden).float().pow(2).mean()
            return loss + 0 * self.frozen.sum()

    return Net()


def main(folder):
    for number, (name, (stage, half)) in enumerate(STAGES.items()):
        work = (folder / name, stage, half, 29700 + number)
        ranks = [multiprocessing.Process(target=train, args=(rank, *work)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    places = ["--input_folder", folder / "zero1/global_step3"]
    places += ["--output_folder", folder / "universal/global_step3_universal"]
    subprocess.run([*tool, *places], check=True)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    found = {
        f"{name}/{key}": value.float().clone()
        for name in STAGES
        for key, value in get_fp32_state_dict_from_zero_checkpoint(str(folder / name)).items()
    }
    save_file(found, folder / "expected.safetensors")
    for script in folder.rglob("*.py"):
        script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
