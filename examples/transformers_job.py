"""A training job with the Trainer of Transformers whose checkpoints are Milepost's.

    torchrun --nproc-per-node 2 examples/transformers_job.py runs/a --steps 12
    torchrun --nproc-per-node 3 examples/transformers_job.py runs/a --steps 24

Kill it at any moment and start it again: it goes on from the newest whole checkpoint. The model is tiny and starts with
random weights; nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from milepost.integrations.transformers import MilepostTrainer


def main() -> None:
    """Train up to `--steps`, from wherever the last run stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()

    arguments = TrainingArguments(
        given.output,
        max_steps=given.steps,
        save_steps=4,
        save_total_limit=2,
        logging_steps=4,
        per_device_train_batch_size=12,
        accelerator_config={"split_batches": True},  # 12 rows for all ranks together, however many there are
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = torch.randint(0, 64, (96, 16))
    trainer = MilepostTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        async_saves=True,
    )
    trainer.train(resume_from_checkpoint=any(Path(given.output).glob("checkpoint-*/manifest-*")))


if __name__ == "__main__":
    main()
