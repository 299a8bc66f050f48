"""Checkpoints in the formats that other tools read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from memckpt.errors import ConfigurationError, UsageError
from memckpt.state import codec
from memckpt.storage import dcp
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.format import NodeState, decode_node_state
from memckpt.storage.store import Store

Format = Literal["dcp", "safetensors", "torch"]
FORMATS: tuple[Format, ...] = get_args(Format)


def read_tensors(store: Store, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors of the part with the parameters, by the names they have in the store."""
    directory = checkpoint.full_part().base_directory
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in dcp.names(store, directory).items()}
    dcp.load_into(store, directory, tensors)
    return tensors


def model_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ``model.load_state_dict`` takes; of shared weights the name that they were first found under."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def optimizer_states(
    state: NodeState, tensors: dict[str, torch.Tensor], groups: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What each optimizer's ``load_state_dict`` takes: state by position, and the groups.

    Args:
        state: of the part that `tensors` are from.
        groups: those of each optimizer, as the rank state has them: ``params`` are names.
    """
    plain: dict[int, Any] = codec.decode(state.plain) if state.plain else {}
    states = []
    for number, described in enumerate(groups):
        positions: dict[str, int] = {}
        packed = []
        for group in described:
            packed.append({**group, "params": [positions.setdefault(name, len(positions)) for name in group["params"]]})
        kept: dict[int, dict[str, Any]] = {}
        for index, param in enumerate(state.spec.params):
            position = positions.get(param.tensor.name)
            owner = next((one for one in param.owners if one.optimizer == number), None)
            if position is None or owner is None:
                continue
            prefix = f"optimizers.{number}.{param.tensor.name}."
            values = {one.key: tensors[prefix + one.key] for one in owner.state if prefix + one.key in tensors}
            values.update(plain.get(index, {}).get(number, {}))
            if values:
                kept[position] = {key: values[key] for key in [*owner.keys, *values] if key in values}
        states.append({"state": dict(sorted(kept.items())), "param_groups": packed})
    return states


def export(store: Store, checkpoint: Checkpoint, target: Path, form: Format) -> None:
    """Write a verified checkpoint to `target` in another format.

    Args:
        store, checkpoint: what to export.
        target: a file; for ``"dcp"`` a directory. It must not exist.
        form: ``"dcp"``: a directory for torch.distributed.checkpoint; ``"safetensors"``: the model's tensors;
            ``"torch"``: ``{"model", "optimizers", "step"}`` for ``torch.load`` with ``weights_only=True``.

    Raises:
        UsageError: there is something at `target`.
        ConfigurationError: the format is unknown, or its library is not installed.
    """
    writers: dict[str, Callable[[Store, Checkpoint, Path], None]] = {
        "dcp": _export_dcp,
        "safetensors": _export_safetensors,
        "torch": _export_torch,
    }
    if form not in writers:
        raise ConfigurationError(f"format: expected one of {', '.join(FORMATS)}, found {form!r}")
    if target.exists():
        raise UsageError(f"{target} exists: choose another name, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    writers[form](store, checkpoint, target)


def _export_dcp(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    part = checkpoint.full_part()
    target.mkdir()
    for file in part.files:
        if file.path.startswith(part.base_directory):
            with store.open(file.path) as source, (target / Path(file.path).name).open("wb") as copy:
                shutil.copyfileobj(source, copy, 8 << 20)


def _export_safetensors(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigurationError("format safetensors needs the package safetensors: pip install safetensors") from error
    tensors = {name: tensor.contiguous() for name, tensor in model_state(read_tensors(store, checkpoint)).items()}
    save_file(tensors, target, metadata={"format": "pt", "step": str(checkpoint.step)})


def _export_torch(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    part = checkpoint.full_part()
    state = decode_node_state(store.read(part.state_path))
    rank_state = codec.decode(state.rank_states[min(state.rank_states)])
    tensors = read_tensors(store, checkpoint)
    optimizers = optimizer_states(state, tensors, rank_state["groups"])
    torch.save({"model": model_state(tensors), "optimizers": optimizers, "step": checkpoint.step}, target)
