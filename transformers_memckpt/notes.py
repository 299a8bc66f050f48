"""Refusal of trainings that cannot be protected, and warnings about state that a restart cannot make exact."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import transformers
from torch import nn

from memckpt.errors import UnsupportedError

# Private methods that we rely upon, and the parameters that they must have.
_METHODS: dict[str, tuple[str, ...]] = {
    "_inner_training_loop": ("trial",),
    "_init_training_state": ("resume_from_checkpoint",),
    "_run_epoch": (
        "epoch", "steps_in_epoch", "num_update_steps_per_epoch", "resume_from_checkpoint", "epochs_trained",
    ),
}  # fmt: skip

_CHANGED = "{name} was {old!r} in the run that is continued, and is {new!r} now"
#: Arguments in whose place the held state has a value: groups, schedule and generators go on.
OF_STATE = frozenset({"learning_rate", "weight_decay", "seed", "data_seed"})
# Arguments that determine a step.
_SETTINGS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate",
    "weight_decay", "max_grad_norm", "warmup_steps", "bf16", "fp16", "seed", "data_seed", "eval_steps",
)  # fmt: skip


def verify(trainer: Any) -> None:
    """Check for the private names that the callback relies on. Raises TypeError (no Trainer) or UnsupportedError."""
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"expected a transformers.Trainer, found {type(trainer).__module__}.{type(trainer).__name__}")
    for name, expected in _METHODS.items():
        method = getattr(trainer, name, None)
        found = inspect.signature(method).parameters if method is not None else {}
        for parameter in expected:
            if parameter not in found:
                raise UnsupportedError(
                    f"MemCheckpointTrainerCallback relies on Trainer.{name}(..., {parameter}, ...), which transformers "
                    f"{transformers.__version__} does not have; use a version that this release was made for "
                    "(docs/integrations.md), or a newer lightning-memckpt"
                )


def refuse(trainer: Any, trial: object) -> None:
    """Refuse a training that cannot be protected. Raises UnsupportedError, with the problem and the remedy."""
    args = trainer.args
    found = {
        "deepspeed": trainer.is_deepspeed_enabled,
        # A tensor-parallel model from from_pretrained() brings one along.
        "a parallelism_config": getattr(trainer.accelerator, "parallelism_config", None) is not None,
        "a TPU": str(args.device).startswith("xla") or trainer.is_fsdp_xla_enabled,
    }
    for name, present in found.items():
        if present:
            raise UnsupportedError(
                f"expected a single device, DistributedDataParallel (torchrun) or FSDP, found {name}; train without "
                "it, or without memckpt"
            )
    if args.n_gpu > 1 or isinstance(trainer.model_wrapped, nn.DataParallel):
        raise UnsupportedError(
            f"expected one device for each process, found DataParallel over {args.n_gpu} devices; start with torchrun, "
            "or set CUDA_VISIBLE_DEVICES to one device"
        )
    if args.auto_find_batch_size:
        raise UnsupportedError(
            "expected auto_find_batch_size=False, found True: it restarts the training within the process; set "
            "per_device_train_batch_size to the size that it has found"
        )
    if trial is not None:
        raise UnsupportedError(
            "expected train(), found hyperparameter_search(): its trials would resume each other; protect the training "
            "that you start with its result"
        )


def settings(args: Any) -> dict[str, Any]:
    """The arguments that determine a step, as plain values."""
    return {name: getattr(args, name, None) for name in _SETTINGS}


def changed_settings(args: Any, held: dict[str, Any], override: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """One line for each argument that has changed, and whether training goes on with the new value.

    Of hyperparameters in `override` the session says so.
    """
    taken = {"learning_rate" if name == "lr" else name for name in override}
    for name, new in settings(args).items():
        if name in held and held[name] != new and name not in taken:
            line = _CHANGED.format(name=name, old=held[name], new=new)
            yield (f"{line}: the held state goes on with its own", False) if name in OF_STATE else (line, True)


def inexact(trainer: Any) -> Iterator[str]:
    """One line, with the reason, for each effect that a restart cannot repeat."""
    args = trainer.args
    if args.dataloader_persistent_workers and args.dataloader_num_workers and trainer.eval_dataset is not None:
        yield (
            "dataloader_persistent_workers: after a restart the evaluation's workers are seeded again, with a number "
            "from torch's generator; without it a restart is exact"
        )
