"""Test whether an optimizer can be redone: its first steps are redone on copies and compared bit by bit.

The test finds steps that depend on more than gradients, groups and state. Attributes: each redo is a fresh sibling with
the attributes as they were at the start, and none may change from step to step, as later steps may depend on what it
has become. Random numbers: the redo draws from other streams. Other tensors: each parameter is redone by itself, as a
redo in pieces would. The user's tensors, objects and generators are not touched.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memckpt.capture.live_state import LiveState, state_of
from memckpt.capture.step_hooks import StepFollower
from memckpt.errors import MemckptError
from memckpt.state import codec, rng
from memckpt.state.optimizers import (
    attributes,
    hyperparameters,
    private_attributes,
    rebuild,
    without_collectives,
    without_global_hooks,
)
from memckpt.state.redo import unrebind
from memckpt.state.tensors import give_gradient, is_dtensor, local
from memckpt.state.traces import leaving_no_trace

_log = logging.getLogger("memckpt")
#: Steps of each optimizer that are redone.
STEPS = 3
#: Records within which an optimizer has to take them; else it counts as one that cannot be redone.
MOST_RECORDS = 64
#: Bytes of parameters, gradients and state that are copied at most.
MOST_BYTES = 256 << 20


class _Difference(Exception):
    """The redo differs from the live step; the message says in what and where."""


class SelfTest:
    """Tests some of a session's optimizers while they take their first steps.

    Args:
        live: the training state.
        tested: indices of the optimizers.
    """

    def __init__(self, live: LiveState, tested: Sequence[int]) -> None:
        names = live.names()
        self._runs = [_Run(live.optimizers[i], names) for i in tested]
        self._records = 0

    def install(self) -> None:
        """Begin with the next step of each optimizer."""
        for run in self._runs:
            run.follower.install()

    def remove(self) -> None:
        """Remove the hooks and free the copies."""
        for run in self._runs:
            run.follower.remove()
        self._runs = []

    def after_record(self) -> str | None:
        """Count a record. Returns why some optimizer cannot be redone; empty if all can; None if not known yet."""
        self._records += 1
        for run in self._runs:
            if run.failure:
                return run.failure
        if all(run.steps >= STEPS for run in self._runs):
            return ""
        if self._records < MOST_RECORDS:
            return None
        slow = next(run for run in self._runs if run.steps < STEPS)
        return f"{slow.name} has taken {slow.steps} steps in {self._records} records, too few to test its redo"


class _Run:
    """The test of one optimizer."""

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        self.name = type(optimizer).__qualname__
        self.steps = 0
        self.failure = ""
        self._optimizer = optimizer
        self._names = names
        #: Not called in compiled steps: the session finds out by itself, and drops this test.
        self.follower = StepFollower(
            optimizer, lambda _: self._guard(self._step_begins), lambda _: self._guard(self._step_ended)
        )
        self._copies: dict[int, tuple[torch.Tensor, torch.nn.Parameter, dict[str, Any]]] = {}
        self._noted: tuple[list[dict[str, Any]], dict[int, torch.Tensor]] | None = None
        self._attributes: bytes | dict[str, Any] = b""
        #: Those that can be encoded, by name, after the first step: until then some are yet to be set.
        self._attributes_after_first: dict[str, bytes] = {}
        self._guard(self._keep_attributes)

    # Hooks: no error in them may end the user's training

    def _guard(self, work: Any, *arguments: Any) -> None:
        if self.failure or self.steps >= STEPS:
            return
        try:
            with torch.no_grad():
                work(*arguments)
        except (_Difference, MemckptError) as error:
            self.failure = str(error)
        except Exception as error:
            _log.debug("memckpt: the self-test of %s failed", self.name, exc_info=True)
            self.failure = f"a redo of {self.name} on copies fails ({type(error).__name__}: {error})"
        if self.failure or self.steps >= STEPS:
            self._copies, self._noted, self._attributes = {}, None, b""

    # State kept of the live optimizer

    def _keep_attributes(self) -> None:
        kept, dropped = attributes(self._optimizer)
        # Encoded as the agent gets them, if it can get them.
        self._attributes = private_attributes(self._optimizer) if dropped else codec.encode(kept)

    def _fresh_attributes(self) -> dict[str, Any]:
        if isinstance(self._attributes, bytes):
            found: dict[str, Any] = codec.decode(self._attributes)
            return found
        return copy.deepcopy(self._attributes)

    def _step_begins(self) -> None:
        if not self._copies:
            for param in _chosen(self._optimizer):
                piece = torch.nn.Parameter(local(param).clone(), requires_grad=param.requires_grad)
                self._copies[id(param)] = param, piece, _private_state(state_of(self._optimizer, param))
        self._noted = self._note_groups()

    def _note_groups(self) -> tuple[list[dict[str, Any]], dict[int, torch.Tensor]]:
        """The groups as in a record, and copies of the gradients."""
        groups = codec.decode(codec.encode(hyperparameters(self._optimizer)))
        scale = getattr(self._optimizer, "grad_scale", None)
        gradients = {}
        for key, (param, _, _) in self._copies.items():
            if param.grad is not None:
                gradient = param.grad if param.grad.is_sparse else local(param.grad)
                # Fused kernels unscale by themselves; a redo gets the gradients that they used.
                gradients[key] = gradient.clone() if scale is None else gradient / local(scale).to(gradient.device)
        return groups, gradients

    # The comparison

    def _step_ended(self) -> None:
        found_inf = getattr(self._optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor) and bool(found_inf.item()):
            return  # a fused optimizer whose step had no effect
        if self._noted is None:
            raise _Difference(f"{self.name} is given a closure and does not evaluate it, so its redo cannot be tested")
        groups, gradients = self._noted
        self._noted = None
        self.steps += 1
        with rng.other_streams(), without_global_hooks(), leaving_no_trace(self._optimizer):
            for index, group in enumerate(self._optimizer.param_groups):
                for param in group["params"]:
                    if id(param) in self._copies:
                        self._redo(index, groups, self._copies[id(param)], gradients.get(id(param)))
        for param, piece, state in self._copies.values():
            self._compare(self._names.get(id(param), "a parameter"), param, piece, state)
        self._compare_attributes()

    def _redo(
        self,
        index: int,
        groups: list[dict[str, Any]],
        copied: tuple[torch.Tensor, torch.nn.Parameter, dict[str, Any]],
        gradient: torch.Tensor | None,
    ) -> None:
        """One step of one parameter, by its own sibling optimizer."""
        _, piece, state = copied
        own = [
            {**copy.deepcopy({k: v for k, v in group.items() if k != "param_names"}), "params": []} for group in groups
        ]
        own[index]["params"] = [piece]
        sibling = rebuild(type(self._optimizer), self._fresh_attributes(), own)
        if state:
            sibling.state[piece] = state
        give_gradient(piece, gradient)
        home = piece.data
        try:
            with without_collectives():
                sibling.step()
        finally:
            piece.grad = None
        kept = next((key for key in vars(piece) if not key.startswith("_")), None)
        if kept is not None:
            raise _Difference(f"{self.name} keeps {kept!r} on its parameters, and not in its state")
        unrebind(piece, home)
        found = sibling.state.get(piece)
        if found is not None and found is not state:
            state.clear()
            state.update(found)

    def _compare(self, name: str, param: torch.Tensor, piece: torch.Tensor, redone: dict[str, Any]) -> None:
        where = f"after step {self.steps} of its redo"
        if not _same_bits(local(param), piece):
            raise _Difference(f"{name} differs {where}: {self.name} uses more than gradients, groups and state")
        live = state_of(self._optimizer, param)
        if set(live) != set(redone):
            raise _Difference(f"the state of {name} has other keys {where}: {self.name} uses more than it keeps there")
        for key, value in live.items():
            if isinstance(value, torch.Tensor) != isinstance(redone[key], torch.Tensor):
                same = False
            elif isinstance(value, torch.Tensor):
                same = _same_bits(local(value), redone[key])
            else:
                same = codec.encode(value) == codec.encode(redone[key])
            if not same:
                raise _Difference(
                    f"state {key!r} of {name} differs {where}: {self.name} uses more than gradients, groups and state"
                )

    def _compare_attributes(self) -> None:
        # Lists of parameters change with them; in the copies empty ones stand for parameters.
        copies = private_attributes(self._optimizer)
        found = {name: codec.encode(value) for name, value in copies.items() if not codec.unencodable_paths(value)}
        if self.steps == 1:
            self._attributes_after_first = found
        for name, before in self._attributes_after_first.items():
            if found.get(name) != before:
                raise _Difference(
                    f"attribute {name!r} of {self.name} changes from step to step, and later steps may depend on it"
                )


def _private_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: local(value).clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.device != theirs.device:
        return False
    if ours.layout != torch.strided:
        return torch.equal(ours.to_dense(), theirs.to_dense())
    pair = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (ours, theirs)]
    return torch.equal(*pair)


def _chosen(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters to test: all if they fit, else the smallest of each kind, then others as space permits."""
    params = [
        (index, param)
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if local(param).numel()
    ]
    params.sort(key=lambda item: local(item[1]).numel())
    kinds: dict[Any, torch.Tensor] = {}
    for index, param in params:
        kinds.setdefault((index, param.ndim, param.dtype, is_dtensor(param)), param)
    first = {id(param) for param in kinds.values()}
    left = MOST_BYTES
    for _, param in sorted(params, key=lambda item: id(item[1]) not in first):
        # The parameter, its gradient, and state of about twice its size.
        nbytes = 4 * local(param).nbytes
        if nbytes <= left or left == MOST_BYTES:
            left -= nbytes
            yield param
