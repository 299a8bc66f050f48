"""Export of checkpoints to the formats of other tools."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

from memckpt.errors import ConfigurationError, ForeignStateError, UnsupportedError, UsageError
from memckpt.state import codec, rng
from memckpt.state.spec import StateSpec
from memckpt.storage import dcp
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.format import MERGED, NodeState, decode_node_state
from memckpt.storage.local_store import sync_directory
from memckpt.storage.node_files import join_states
from memckpt.storage.store import Store

Writer = Callable[[Store, Checkpoint, Path], None]


def read_tensors(store: Store, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Unsharded tensors of the first rank's model and optimizers, by their names in the store."""
    directory, nodes = checkpoint.directory, checkpoint.tensor_nodes
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in dcp.names(store, directory, nodes).items()
        if not name.startswith("ranks.")
    }
    dcp.load_into(store, directory, tensors, below=nodes)
    return tensors


@dataclass(frozen=True)
class ExportedState:
    """A checkpoint as values in host memory, for writers of other formats."""

    step: int  #: the framework's number
    model: dict[str, torch.Tensor]  #: the argument of ``model.load_state_dict``
    optimizers: list[dict[str, Any]]  #: for each optimizer the argument of its ``load_state_dict``
    provided: Mapping[str, Any]  #: values given to the first rank's session with ``provide`` and ``register``
    #: By rank, the arguments of `random.setstate` (``python``), `numpy.random.set_state` (``numpy``) and
    #: `torch.set_rng_state` (``torch``); ``device``: of the rank's own device, or None.
    generators: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def provided_as(self, name: str, run: str) -> Any:
        """The value that an adapter has provided as `name`.

        Raises ForeignStateError if there is none; `run` says in words which runs have it.
        """
        if name not in self.provided:
            raise ForeignStateError(
                f"expected a run {run}, found one that provides {sorted(self.provided)}; choose another format"
            )
        return self.provided[name]

    @staticmethod
    def untied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contiguous tensors, tied ones under their first name only: frameworks store them so with safetensors."""
        names: dict[int, str] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), name)
        return {name: tensors[name].contiguous() for name in names.values()}


def model_state(spec: StateSpec, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The argument of ``model.load_state_dict``, with tied weights under all their names."""
    outside = set(spec.outside)
    named = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.") and name.removeprefix("model.") not in outside
    }
    return {**named, **{key: tensors[f"model.{name}"] for key, name in spec.aliases}}


def read_state(store: Store, checkpoint: Checkpoint) -> ExportedState:
    """Read a checkpoint as values. Raises UnsupportedError: the model was sharded by FSDP1."""
    parts = checkpoint.parts.values()
    read = {part.state_path: decode_node_state(store.read(part.state_path)) for part in parts}
    state = join_states(checkpoint, lambda part: read[part.state_path])
    _refuse_flattened(state.spec)
    ranks = {rank: codec.decode(encoded) for one in read.values() for rank, encoded in one.rank_states.items()}
    first = ranks[0]
    tensors = read_tensors(store, checkpoint)
    return ExportedState(
        checkpoint.step,
        model_state(state.spec, tensors),
        optimizer_states(state, tensors, first["groups"]),
        first["provided"],
        {rank: rng.library_states(each["rng"]) for rank, each in sorted(ranks.items())},
    )


def optimizer_states(
    state: NodeState, tensors: dict[str, torch.Tensor], groups: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The argument of each optimizer's ``load_state_dict``: state by position, and the groups.

    `state` is that of :func:`join_states`; `groups` are those of its rank state, where ``params`` are names.
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


def formats() -> dict[str, Writer]:
    """All formats by name: built-in ones, and those of installed packages (entry point group ``memckpt.formats``)."""
    others: dict[str, Writer] = {
        entry.name: partial(_write_with, entry) for entry in entry_points(group="memckpt.formats")
    }
    return {"dcp": _write_dcp, "safetensors": _write_safetensors, "torch": _write_torch} | others


def export(store: Store, checkpoint: Checkpoint, target: Path, form: str) -> None:
    """Write a verified checkpoint to `target`, which must not exist, in another format, durably.

    `target` is a file, or a directory (``dcp``, ``accelerate``, ``transformers``), with the umask's permissions.
    ``dcp`` is for torch.distributed.checkpoint; ``safetensors`` has the model's tensors; ``torch`` is
    ``{"model", "optimizers", "step"}`` for ``torch.load`` with ``weights_only=True``. Adapters bring ``lightning`` for
    ``Trainer.fit(ckpt_path=...)``, ``accelerate`` for ``Accelerator.load_state``, and ``transformers`` for
    ``Trainer.train(resume_from_checkpoint=...)``.

    Raises UsageError if `target` exists, ConfigurationError for a format that is unknown or whose library is not
    installed, UnsupportedError if the model was sharded by FSDP1.
    """
    writers = formats()
    if form not in writers:
        raise ConfigurationError(f"format: expected one of {', '.join(sorted(writers))}, found {form!r}")
    if target.exists():
        raise UsageError(f"{target} exists: choose another name, or remove it first")
    _refuse_flattened(decode_node_state(store.read(checkpoint.part_serving(0).state_path)).spec)
    target.parent.mkdir(parents=True, exist_ok=True)
    writers[form](store, checkpoint, target)
    _settle(target)


def _refuse_flattened(spec: StateSpec) -> None:
    if spec.flattened:
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) shards flattened parameters, which only its ranks can put together: "
            "resume with as many ranks and save model.state_dict() there; models sharded by fully_shard can be exported"
        )


def _settle(target: Path) -> None:
    """Sync a file, or all files of a directory, and apply the umask: some libraries create private files.

    Raises OSError.
    """
    # `os.umask` reads it only by changing it, for all threads.
    found = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    umask = int(found[1], 8) if found else 0o077
    for path in sorted([target, *target.rglob("*")], reverse=True):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if path.is_dir():
            sync_directory(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_with(entry: EntryPoint, store: Store, checkpoint: Checkpoint, target: Path) -> None:
    try:
        write: Callable[[ExportedState, Path], None] = entry.load()
    except ImportError as error:
        raise ConfigurationError(f"format {entry.name} needs a package that is not installed: {error}") from error
    write(read_state(store, checkpoint), target)


def _write_dcp(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    target.mkdir()
    nodes = checkpoint.tensor_nodes
    (target / MERGED).write_bytes(pickle.dumps(dcp.merged(store, checkpoint.directory, nodes)))
    for node in nodes:
        part = checkpoint.parts[node]
        (target / node).mkdir()
        for file in part.files:
            if file.path.startswith(f"{part.base_directory}/"):
                with store.open(file.path) as source, (target / node / Path(file.path).name).open("wb") as copy:
                    shutil.copyfileobj(source, copy, 8 << 20)


def _write_safetensors(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigurationError("format safetensors needs the package safetensors: pip install safetensors") from error
    # Tied weights are written once for each of their names: the format does not support sharing.
    tensors = {name: tensor.clone() for name, tensor in read_state(store, checkpoint).model.items()}
    save_file(tensors, target, metadata={"format": "pt", "step": str(checkpoint.step)})


def _write_torch(store: Store, checkpoint: Checkpoint, target: Path) -> None:
    state = read_state(store, checkpoint)
    torch.save({"model": state.model, "optimizers": state.optimizers, "step": state.step}, target)
