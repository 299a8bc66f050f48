"""Objects that are no model, as something with state_dict() and load_state_dict(); and torchmetrics, wherever they are.

A Metric keeps its state in attributes, and its wrappers keep counts and extremes there. Its state_dict() is empty.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memckpt.capture.beside.attributes import MODULE_NAMES, Attributes, tensors_in, unstorable
from memckpt.capture.beside.modules import is_metric
from memckpt.errors import ConfigurationError, ForeignStateError, UsageError
from memckpt.state import rng
from memckpt.user_messages import nbytes_text

_log = logging.getLogger("memckpt")
#: What add_state() was called with: the same in each process.
_CONSTANT = MODULE_NAMES | {"_defaults", "_persistent", "_reductions"}
#: Types of attributes that say where a metric is, and not what it has counted.
_PLACES = (torch.device, torch.dtype)
_LARGE_METRIC_BYTES = 8 << 20

#: Modules by name, walked anew on each call.
Modules = Callable[[], Mapping[str, nn.Module]]


def as_stateful(name: str, obj: Any, attributes: Sequence[str] = ()) -> Any:
    """What carries an object that a user registers: it has state_dict() and load_state_dict().

    Raises:
        UsageError: the object has no such methods.
        ConfigurationError, UnsupportedStateError: as :class:`AttributesOf`.
    """
    if attributes:
        return AttributesOf(name, obj, attributes)
    if isinstance(obj, rng.GENERATOR_TYPES):
        return GeneratorState(obj)
    if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
        raise UsageError(
            f"register({name!r}): expected an object with state_dict() and load_state_dict(), found "
            f"{type(obj).__qualname__}"
        )
    return ModuleState(name, obj) if isinstance(obj, nn.Module) and _keeps_attributes(obj) else obj


def _keeps_attributes(module: nn.Module) -> bool:
    """Whether a module has metrics in it, or a state_dict() without any state."""
    without = next(module.parameters(), None) is None and not module.state_dict()
    return without or any(map(is_metric, module.modules()))


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that can be stored; they may share memory with live ones."""
    return {
        key: value
        for key, value in vars(module).items()
        if key not in _CONSTANT and not isinstance(value, _PLACES) and unstorable(value, "") is None
    }


def _restore_values(modules: Modules, held: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Write copies of held values to attributes and buffers; yields the names of modules that are missing."""
    for path, module in modules().items():
        if is_metric(module) and isinstance(
            module, nn.ModuleList
        ):  # a MetricTracker: a base, and one for each increment
            tracker: Any = module
            names = [".".join(filter(None, (path, str(number)))) for number in range(1, len(held) + 1)]
            count = 1 + sum(name in held for name in names)
            while len(tracker) > count:
                del tracker._modules[str(len(tracker) - 1)]  # `del` of a ModuleList would rename the base
            while len(tracker) < count:
                tracker.increment()
    live = modules()
    for name, values in held.items():
        if name not in live:
            yield name
            continue
        module = live[name]
        for key, value in copy.deepcopy(values).items():
            (module._buffers if key in module._buffers else vars(module))[key] = value


class MetricStates:
    """All metrics among some modules. `inexact`: called with the reason when one is not there at the resume.

    Args:
        metrics: those that there are at a commit.
        modules: all modules, at a resume.
    """

    def __init__(self, metrics: Modules, modules: Modules, inexact: Callable[[str], object]) -> None:
        self._metrics = metrics
        self._modules = modules
        self._inexact = inexact
        self._large: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Their values, by the metrics' names."""
        states = {name: _plain_values(metric) for name, metric in self._metrics().items()}
        for name, values in states.items():
            if name not in self._large and sum(one.nbytes for one in tensors_in(values)) > _LARGE_METRIC_BYTES:
                self._large.add(name)
                _log.warning(
                    "memckpt: the metric %r accumulates more than %s, which is copied at every step",
                    *(name, nbytes_text(_LARGE_METRIC_BYTES)),
                )
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; says which are not there any more."""
        for name in _restore_values(self._modules, state):
            self._inexact(f"the metric {name} is not there at the resume; make it before restore()")


class ModuleState:
    """A module whose state_dict() leaves out what it counts, as an object with a state_dict() that has it.

    Carried are the plain attributes and non-persistent buffers of the metrics in it; of all modules if there are none.

    Args:
        name: name of the object, for messages.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module

    def _modules(self) -> dict[str, nn.Module]:
        modules = dict(self._module.named_modules())
        return {path: one for path, one in modules.items() if is_metric(one)} or modules

    def state_dict(self) -> dict[str, Any]:
        """The module's own state, and what that leaves out."""
        values = {
            path: _plain_values(one) | {key: one._buffers[key] for key in one._non_persistent_buffers_set}
            for path, one in self._modules().items()
        }
        return {"state": self._module.state_dict(), "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both. Raises ForeignStateError if a module is missing."""
        self._module.load_state_dict(copy.deepcopy(state["state"]))
        for path in _restore_values(self._modules, state["values"]):
            raise ForeignStateError(
                f"the registered {self._name!r}: expected a module at {path!r}, as in the run that is continued, found "
                "none; make it before the training, or start over with resume='never'"
            )


class GeneratorState:
    """A generator as an object with a state_dict()."""

    def __init__(self, generator: rng.AnyGenerator) -> None:
        self._generator = generator
        self.state_dict()  # raises where it has none

    def state_dict(self) -> dict[str, Any]:
        """Its state. Raises ValueError if it has none (SystemRandom)."""
        return rng.capture_generator(self._generator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        rng.restore_generator(self._generator, state)


class AttributesOf:
    """Some plain attributes of one object, as an object with a state_dict().

    Args:
        name: name of the object, for messages.
        obj: the object.
        names: names of its attributes; dotted for attributes of its attributes.

    Raises:
        ConfigurationError, UnsupportedStateError: as :meth:`Attributes.check`.
    """

    def __init__(self, name: str, obj: object, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise ConfigurationError(f"attributes: expected a list of names, found the str {names!r}")
        self._obj, self._names = obj, tuple(names)
        self._attributes = Attributes((f"{name}.{each}" for each in self._names), lambda: {name: obj})
        self._attributes.check()

    def objects(self) -> list[Any]:
        """The values that exist."""
        return self._attributes.objects()

    def has(self, obj: object, name: str) -> bool:
        """Whether this is the object, and the name one of its attributes here."""
        return obj is self._obj and name in self._names

    def state_dict(self) -> dict[str, Any]:
        """The values. Raises as the constructor does."""
        self._attributes.check()
        return self._attributes.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the values back."""
        self._attributes.restore(state)
