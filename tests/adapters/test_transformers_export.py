"""`memckpt export --format transformers` against checkpoints of the Trainer's own, saved behind the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memckpt
from memckpt import ExportedState
from memckpt.errors import ForeignStateError
from memckpt.state import codec, rng
from tests.support.faults.frozen import differences, freeze
from tests.support.trainings import fake_session
from tests.support.trainings.transformers_cases import Windows
from transformers_memckpt import protect
from transformers_memckpt.export import write

#: Batches of an epoch.
BATCHES = 5
CLOCKS = ("runtime", "per_second")


class Exporting(fake_session.FakeSession):
    """Exports what is committed: `exported-STEP`."""

    directory: Path

    def commit(self, *, step: int, gradients_pending: bool | None) -> bool:
        generators = rng.library_states(rng.capture())
        committed = super().commit(step=step, gradients_pending=gradients_pending)
        provided = codec.decode(codec.encode({name: capture() for name, capture in self._captures.items()}))
        tensors: dict[int, torch.Tensor] = {}
        model = {name: tensors.setdefault(each.data_ptr(), each) for name, each in self._model.state_dict().items()}
        optimizers = [each.state_dict() for each in self._optimizers]
        write(ExportedState(step, model, optimizers, provided, {0: generators}), self.directory / f"exported-{step}")
        return committed


def trainer(directory: Path, accumulated: int, epochs: int, save: bool) -> Trainer:
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2)  # with dropout
    arguments = TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=epochs,
        logging_steps=2,
        save_strategy="steps" if save else "no",
        save_steps=1,
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Windows(4 * BATCHES, augmented=False))


def further(directory: Path, accumulated: int, checkpoint: Path) -> dict[str, Any]:
    """What a Trainer that knows nothing of memckpt does with a checkpoint, for an epoch more than the run had."""
    made = trainer(directory, accumulated, epochs=3, save=False)
    made.train(resume_from_checkpoint=str(checkpoint))
    assert made.optimizer is not None
    history = [
        {name: value for name, value in one.items() if not name.endswith(CLOCKS)} for one in made.state.log_history
    ]
    return {
        "step": made.state.global_step,
        "history": history,
        "model": freeze(dict(made.model.state_dict())),
        "optimizer": freeze(made.optimizer.state_dict()),
        "generators": freeze([torch.get_rng_state(), np.random.get_state()]),
    }


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_directory_is_the_one_that_the_trainer_saves_behind_that_step(
    accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exporting, "directory", tmp_path, raising=False)
    monkeypatch.setattr(memckpt, "attach", Exporting)
    made = trainer(tmp_path, accumulated, epochs=2, save=True)
    protect(made, tmp_path / "run")
    made.train()
    per_epoch = -(-BATCHES // accumulated)
    steps = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("exported-*"))
    assert steps == list(range(1, 2 * per_epoch + 1))
    for step in steps:
        stock, ours = tmp_path / f"checkpoint-{step}", tmp_path / f"exported-{step}"
        names = {path.name for path in stock.iterdir()} - {"training_args.bin", "generation_config.json"}
        assert {path.name for path in ours.iterdir()} == names
        assert not differences(
            freeze(load_file(stock / "model.safetensors")), freeze(load_file(ours / "model.safetensors"))
        )
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            expected, found = (freeze(torch.load(each / name, weights_only=False)) for each in (stock, ours))
            assert expected == found, (step, name)
        said = [json.loads((each / "trainer_state.json").read_text()) for each in (stock, ours)]
        for one in said:
            del one["stateful_callbacks"]["TrainerControl"]  # what the Trainer was about to do; not read back
        assert said[0] == said[1], step
    for step in (1, per_epoch, steps[-1]):
        found = [
            further(tmp_path / "further", accumulated, tmp_path / f"{kind}-{step}")
            for kind in ("checkpoint", "exported")
        ]
        assert found[0]["step"] == 3 * per_epoch
        assert found[0] == found[1], step


def test_a_run_of_another_kind_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ForeignStateError, match=r"of a transformers.Trainer .* found one that provides \['mine'\]"):
        write(ExportedState(1, {}, [], {"mine": {}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
