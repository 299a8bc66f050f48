"""Optimizers that step parameters although the session was not given them: torch's hooks for all optimizers see them.

Their parameters are copied by value, as they change. The state of torch's own classes is carried with each record, and
given to the optimizer of that class and these parameters that takes its first step after a resume.

And schedulers and gradient scalers of the optimizers that were given, of which nobody carries the state.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memckpt.capture.beside.attributes import same
from memckpt.capture.gradient_ops import scalers
from memckpt.state.optimizers import hyperparameters
from memckpt.state.tensors import is_dtensor

if TYPE_CHECKING:
    from memckpt.capture.live_state import LiveState

#: Bytes of state of such optimizers that are carried.
MOST_BYTES = 16 << 20
_REMEDY = "pass it to attach() with the others"
#: Schedulers are looked for at each commit whose number is a power of two to this: 1, 16, 256.
_LOOK_POWER = 4
#: Members of a container that is looked into.
_MOST_INNER = 64
#: The optimizers of all sessions in this process.
_given: WeakSet[Optimizer] = WeakSet()
_log = logging.getLogger("memckpt")


class Strangers:
    """The optimizers in this process that no session follows.

    Args:
        live: the live state.

    Attributes:
        stepped: called with the parameters of such an optimizer, behind each of its steps.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self._handles: list[Any] = []
        #: By thread, the call of a given optimizer's step; that of the last one, if it raised.
        self._outermost: dict[int, FrameType] = {}
        self.stepped: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._commits = 0
        #: Names of their parameters by group, and their groups as they were first seen.
        self._carried: WeakKeyDictionary[Optimizer, tuple[list[list[str]], list[dict[str, Any]]]] = WeakKeyDictionary()
        #: The number of commits before the first step of optimizers of parameters that nobody knows.
        self._unknown: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        #: What was held of optimizers that have not taken a step yet.
        self._held: list[dict[str, Any]] = []

    def install(self) -> None:
        """Begin to look."""
        _given.update(self._live.optimizers)
        hooks = register_optimizer_step_pre_hook(self._stepping), register_optimizer_step_post_hook(self._stepped)
        self._handles = list(hooks)

    def remove(self) -> None:
        """End that. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _given.difference_update(self._live.optimizers)

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        caller, outermost = sys._getframe(1), self._outermost.get(threading.get_ident())
        if outermost is not None and runs_within(outermost, caller):
            return  # inside another optimizer's step it is a part of that one
        if optimizer in _given:
            self._outermost[threading.get_ident()] = caller
        elif optimizer not in self._carried:
            self._meet(optimizer)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        outermost = self._outermost.get(threading.get_ident())
        if outermost is sys._getframe(1):
            self._outermost.pop(threading.get_ident(), None)
        elif outermost is None and self.stepped is not None and optimizer not in _given:
            self.stepped([param for group in optimizer.param_groups for param in group["params"]])

    def _meet(self, optimizer: Optimizer) -> None:
        names, name = self._live.names(), type(optimizer).__qualname__
        groups = [[names.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]
        known = [one for group in groups for one in group if one]
        given = {id(p) for one in self._live.optimizers for group in one.param_groups for p in group["params"]}
        # One that takes the place of a given one is made by the script at a step that a resume does not repeat.
        shares = any(id(param) in given for group in optimizer.param_groups for param in group["params"])
        if shares and any(value is optimizer for one in self._live.optimizers for value in vars(one).values()):
            return  # one that a given one steps: its state is that one's
        if not known:
            # One that is made for an evaluation takes its steps between two commits.
            if self._unknown.setdefault(optimizer, self._commits) != self._commits:
                self._leave_out(
                    f"{name}, an optimizer of parameters that are in no module given to attach(), takes steps"
                )
        elif shares or not all(map(all, groups)) or getattr(torch.optim, name, None) is not type(optimizer):
            self._leave_out(f"{name}, which steps {known[0]}, is an optimizer that memckpt was not given")
        else:
            _log.warning(
                "memckpt: %s, which steps %s, is an optimizer that memckpt was not given: its state is carried, and "
                "its parameters are copied with each record, which costs more than to %s",
                name,
                known[0],
                _REMEDY,
            )
            self._give_back(optimizer, name, groups)
            self._carried[optimizer] = groups, hyperparameters(optimizer)

    def _leave_out(self, what: str) -> None:
        self._live.not_carried.setdefault(f"{what}, and its state is not carried; {_REMEDY}")

    @torch.no_grad()
    def _give_back(self, optimizer: Optimizer, name: str, groups: Sequence[Sequence[str]]) -> None:
        """Give it the state of its predecessor in the dead attempt."""
        found = next((one for one in self._held if (one["class"], one["params"]) == (name, list(groups))), None)
        if found is None:
            return
        self._held.remove(found)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, state in zip(params, found["state"], strict=True):
            if state:
                optimizer.state[param] = {
                    key: value.to(param.device) if isinstance(value, torch.Tensor) and value.dim() else value
                    for key, value in state.items()
                }

    def describe(self) -> list[dict[str, Any]]:
        """Part of the rank state that :meth:`hold` reads; called in each commit."""
        self._outermost.pop(threading.get_ident(), None)  # a step that raised has no end
        self._commits += 1
        if not self._carried:
            return list(self._held)
        found, nbytes = list(self._held), 0
        for optimizer, (groups, before) in self._carried.items():
            name = type(optimizer).__qualname__
            states = [dict(optimizer.state.get(p, {})) for group in optimizer.param_groups for p in group["params"]]
            tensors = [one for state in states for one in state.values() if isinstance(one, torch.Tensor)]
            nbytes += sum(one.nbytes for one in tensors)
            if nbytes > MOST_BYTES or any(map(is_dtensor, tensors)) or hyperparameters(optimizer) != before:
                self._leave_out(f"{name}, which steps {groups[0][0]}, is an optimizer that memckpt was not given")
            else:
                found.append({"class": name, "params": groups, "state": states})
        return found

    def keep_described(self, described: Sequence[dict[str, Any]]) -> None:
        """Keep what :meth:`describe` returned for the optimizers that are to come; those that are here get it back."""
        self._held = list(described)
        for optimizer, (groups, _) in self._carried.items():
            self._give_back(optimizer, type(optimizer).__qualname__, groups)


class Helpers:
    """Schedulers and gradient scalers of the given optimizers.

    Torch marks an optimizer with most schedulers, but not with all, nor with those of other libraries. So they are
    looked for among the objects that refer to one, which takes some 50 ms: at first, and ever more seldom.
    """

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._optimizers = optimizers
        self._commits = 0
        self._known: list[Any] = []

    def find_uncarried(self, carried: Iterable[object], provided: Mapping[str, Any]) -> Iterator[str]:
        """Why a resume would not be exact, one reason for each whose state is not carried.

        Args:
            carried: objects whose state is carried; schedulers among them carry those within them.
            provided: values of which each may be such a state.
        """
        optimizers = self._optimizers()
        marks = [(getattr(one.step, "_wrapped_by_lr_sched", False), scalers.get(one)) for one in optimizers]
        self._commits += 1
        power = self._commits.bit_length() - 1
        if marks == self._known and (self._commits != 1 << power or power % _LOOK_POWER):
            return
        self._known = marks
        schedulers = list(_schedulers(optimizers))
        reached = {id(each) for each in carried}
        for _ in schedulers:  # one that is carried carries those within it
            reached |= {id(inner) for each in schedulers if id(each) in reached for inner in _inner(each)}
        left = [one for one in schedulers if id(one) not in reached]
        within = {id(inner) for each in left for inner in _inner(each)}
        found = [("scheduler", one) for one in left if id(one) not in within]
        found += [("scaler", one) for _, one in marks if one is not None and id(one) not in reached]
        states = list(_values(dict(provided), 4))
        for kind, helper in found:
            if not any(same(helper.state_dict(), state) for state in states):
                yield (
                    f"the {kind} {type(helper).__qualname__} starts over; register({kind!r}, {kind}) with the session, "
                    "or with the plugin of Accelerate, before training begins"
                )


def _schedulers(optimizers: Sequence[Any], depth: int = 2) -> Iterator[Any]:
    """What refers to an optimizer, or to a wrapper of one, and has steps and a state of numbers, not of a model."""
    held = gc.get_referrers(*optimizers)  # objects, and the dicts of objects
    dicts = [one for one in held if type(one) is dict]
    wrappers = []
    for owner in {id(one): one for one in (*held, *(gc.get_referrers(*dicts) if dicts else ()))}.values():
        kind = type(owner)
        acts = all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict"))
        if not acts or issubclass(kind, torch.nn.Module):
            continue
        values = list(getattr(owner, "__dict__", {}).values())
        if not any(one is each for one in values for each in optimizers):
            continue
        if any(isinstance(one, torch.nn.Module) for one in values):
            continue  # a trainer, whose state_dict() may gather a model
        if hasattr(kind, "zero_grad") or hasattr(kind, "param_groups"):
            wrappers.append(owner)
        elif _is_plain(owner):
            yield owner
    if wrappers and depth:
        yield from _schedulers(wrappers, depth - 1)


def _is_plain(owner: Any) -> bool:
    try:
        # A rate may be a tensor.
        return not any(isinstance(one, torch.Tensor) and one.numel() > 1 for one in _values(owner.state_dict(), 4))
    except Exception:  # of a base class that has none: it is no scheduler
        return False


def _inner(owner: object) -> Iterator[object]:
    """Attributes of an object, and members of lists and dicts there: SequentialLR has others in a list."""
    for value in list(getattr(owner, "__dict__", {}).values()):
        yield value
        if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_INNER:
            yield from value.values() if isinstance(value, dict) else value


def _values(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, (dict, list, tuple)) and len(value) <= _MOST_INNER:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values(one, depth - 1)


def runs_within(frame: FrameType, caller: FrameType | None) -> bool:
    """Whether a call is among those that have led to `caller`."""
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame
