"""A small GPT-2, made from a configuration, on the standard library's source text, with transformers.Trainer.

    python examples/transformers_trainer.py --run-dir runs/gpt2     # kill it, at any moment
    python examples/transformers_trainer.py --run-dir runs/gpt2     # it continues after the last step

Nothing is downloaded. Only the lines marked with (*) are memckpt's.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import memckpt  # (*)
from transformers_memckpt import protect  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/
from examples.digest import digest
from examples.gpt import BYTES, Corpus

CONTEXT = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of source text in the model's format, int64 of shape (64,); it shifts the labels itself."""

    def __init__(self) -> None:
        self.corpus = Corpus(CONTEXT)

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.corpus[index]
        return {"input_ids": tokens, "labels": tokens}


class PrintSteps(TrainerCallback):
    """Prints a line for each step: progress, and a moment to kill the process."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        print(f"pid {os.getpid()}: training begins", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"step {state.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    memckpt.add_arguments(parser, run_dir="runs/transformers")  # (*)
    args = parser.parse_args()
    run_dir, resume, config = memckpt.from_args(args)  # (*)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=64, n_head=2, vocab_size=BYTES, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
        )
    )
    windows = Windows()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{run_dir}/trainer",
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Subset(windows, range(4000)),
        eval_dataset=Subset(windows, range(4000, 4032)),
        callbacks=[PrintSteps()],
    )
    protect(trainer, run_dir, resume=resume, config=config)  # (*)
    trainer.train()
    print(f"done at step {trainer.state.global_step}: weights {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
