"""State of a loader's own objects: generators, and the counters of its samplers.

A path such as ``batch_sampler.sampler.generator`` names the same object in two processes that build the same loader.
Generators are searched on the loader, on its samplers and on its dataset (not inside transforms); counters, such as the
``epoch`` of a distributed sampler, on its samplers only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from memckpt.errors import DataPositionError
from memckpt.state import rng

OwnState = dict[str, Any]
"""``{"generators": {path: state}, "attributes": {path: {name: scalar}}}``."""

Progress = dict[str, list[str]]
"""By sampler path, names of the attributes that change while training runs."""

# Attributes that refer from a sampler or dataset to the one it wraps.
_EDGES = frozenset({"sampler", "_sampler", "batch_sampler", "base_sampler", "dataset", "data_source"})
#: Beginning of the paths below a loader's dataset.
_DATASET = "dataset."
_SCALARS = (bool, int, float, str, bytes, type(None))
_LARGEST_INT = 2**63
#: Attributes that belong to the pass and not to the sampler's configuration. The second is that of Accelerate's and
#: HF's samplers, which may have drawn another value in this process.
_ALWAYS = ("epoch", "initial_seed")


def capture(roots: Mapping[str, object]) -> OwnState:
    """The state of every generator and sampler that can be reached from `roots`, by path."""
    generators: dict[str, Any] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for path, found in _walk(roots):
        if isinstance(found, rng.GENERATOR_TYPES):
            generators[path] = rng.capture_generator(found)
        elif _is_sampler(path, found):
            attributes[path] = _scalars(found)
    return {"generators": generators, "attributes": attributes}


def restore(roots: Mapping[str, object], state: OwnState, progress: Progress | None = None) -> None:
    """Set everything that can be reached from `roots` to `state`.

    A generator that a dataset has not made yet, as it makes it with its first sample, is made here.

    Args:
        progress: the sampler attributes to set; None for all of them. It excludes a sampler's configuration (batch
            size, rank): a difference there has to show as different indices.

    Raises:
        DataPositionError: a recorded generator is missing, or has another type.
    """
    generators: dict[str, rng.AnyGenerator] = {}
    samplers: dict[str, object] = {}
    others: dict[str, object] = {}
    for path, found in _walk(roots):
        others[path] = found
        if isinstance(found, rng.GENERATOR_TYPES):
            generators[path] = found
        elif _is_sampler(path, found):
            samplers[path] = found
    for path, generator_state in state["generators"].items():
        try:
            if path in generators:
                rng.restore_generator(generators[path], generator_state)
                continue
            owner, name = others.get(path.rpartition(".")[0]), path.rpartition(".")[2]
            if path.startswith(_DATASET) and owner is not None and getattr(owner, name, None) is None:
                setattr(owner, name, rng.make_generator(generator_state))
                continue
            raise DataPositionError(
                f"expected a random generator at loader.{path}, as in the run that is continued, found none; "
                "build the loader in the same way in both runs"
            )
        except ValueError as error:
            raise DataPositionError(f"the generator at loader.{path} cannot be restored: {error}") from error
    for path, values in state["attributes"].items():
        sampler = samplers.get(path)
        if sampler is not None:
            names = values if progress is None else progress.get(path, ())
            found = {name: values[name] for name in names if name in values}
            if isinstance(found.get("initial_seed"), str):
                found["initial_seed"] = int(found["initial_seed"])
            vars(sampler).update(found)


def changed(before: OwnState, now: OwnState) -> Progress:
    """The sampler attributes that differ between two captures, and those that always belong to the pass."""
    progress: Progress = {}
    for path, values in now["attributes"].items():
        old = before["attributes"].get(path, {})
        names = [name for name in values if name in _ALWAYS or name not in old or old[name] != values[name]]
        if names:
            progress[path] = names
    return progress


def unrepeatable_generator(roots: Mapping[str, object]) -> str | None:
    """Path of a generator without a repeatable state (`random.SystemRandom`); None if there is none."""
    seen: list[str] = []
    for _ in _walk(roots, seen.append):
        pass
    return seen[0] if seen else None


def _walk(roots: Mapping[str, object], on_stateless: Callable[[str], None] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of every generator, sampler and dataset, each object once."""
    queue = list(roots.items())
    seen: set[int] = set()
    for path, found in queue:  # grows while it is walked
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, random.SystemRandom):
            if on_stateless is not None:
                on_stateless(path)
            continue
        yield path, found
        if isinstance(found, rng.GENERATOR_TYPES):
            continue
        for name, value in getattr(found, "__dict__", {}).items():
            if name in _EDGES or isinstance(value, (*rng.GENERATOR_TYPES, Sampler)):
                queue.append((f"{path}.{name}", value))


def _is_sampler(path: str, found: object) -> bool:
    return isinstance(found, Sampler) or path.rpartition(".")[2].endswith("sampler")


def _scalars(sampler: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        if name == "initial_seed" and isinstance(value, int):
            found[name] = str(value)  # torch's seeds have 64 bits, too many for the codec
        elif isinstance(value, _SCALARS) and not (isinstance(value, int) and abs(value) >= _LARGEST_INT):
            found[name] = value
    return found
