"""Gradients between two steps: their presence and kind, and their values where something may still use them.

Optimizers treat None and zeros differently. After ``zero_grad(set_to_none=False)`` a parameter that a batch does not
use has a gradient of zeros, and its optimizer steps it (decay, momentum). A parameter whose gradient is None is not
stepped. So a resume puts zeros where there was a gradient that is dropped before it is used again.

Few gradients are carried with every record, whatever becomes of them. Of many, those are carried that are still there,
and are not zeros, when the next backward comes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memckpt.state.optimizers import dtype_name, dtype_of
from memckpt.state.tensors import give_gradient, is_dtensor, version

if TYPE_CHECKING:
    from memckpt.capture.live_state import LiveState

#: None: no gradient. Else its layout ("dense" or "sparse"), its dtype and, if sparse, its number of sparse dimensions.
Kind = list[Any] | None
#: First word of the names of gradients that are copied by value.
GRADIENTS = "memckpt_gradients"
#: Bytes of gradients that are carried with every record.
FEW_BYTES = 64 << 10
#: Bytes of gradients that are carried until it is known what becomes of them.
UNKNOWN_BYTES = 16 << 20
#: Said of a record whose gradients were too large for that.
UNKNOWN = (
    "the run was killed before it was known whether gradients are dropped or zeroed before the next backward; they are "
    "zeros now"
)

_log = logging.getLogger("memckpt")


class LeftGradients:
    """Whether gradients that a step has used are dropped or zeroed before the next backward, as far as observed.

    Args:
        live: the live state.

    Attributes:
        known: whether a backward has begun since a commit.
        kept: names of parameters whose gradients are copied by value.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.known = False
        self._looked: set[Hashable] = set()
        self._looks = 0
        self._versions: dict[int, int] = {}
        #: By family, the parameter that got the first gradient of the last backward; its gradient at the last commit.
        self._first: dict[Hashable, torch.Tensor] = {}
        self._was: dict[Hashable, tuple[Callable[[], torch.Tensor | None], int]] = {}
        self._zeros: dict[str, torch.Tensor] = {}

    @property
    def kept(self) -> set[str]:
        found = (name.split(".", 1) for name in self._live.growth.changing if name.startswith(f"{GRADIENTS}."))
        return {name for _, name in found}

    def get(self, name: str) -> torch.Tensor | None:
        """The gradient of that parameter; zeros in its place where it is None."""
        param = self._live.parameter(name)
        return None if param is None else self.of(name, param)

    def of(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """As :meth:`get`, for a parameter at hand."""
        if param.grad is not None:
            return param.grad
        if name not in self._zeros or self._zeros[name].shape != param.shape:
            self._zeros[name] = torch.zeros_like(param, requires_grad=False)
        return self._zeros[name]

    def take_restored(self, name: str) -> torch.Tensor | None:
        """What was restored in the place of a gradient that was None."""
        return self._zeros.pop(name, None)

    def committed(self, versions: Mapping[int, int]) -> None:
        """Note that a record has ended, with the version counters of large gradients by the `id` of the parameter."""
        self._versions = dict(versions)
        self._looked.clear()
        large = [(family, one.grad) for family, one in self._first.items() if id(one) in versions]
        self._was = {family: (weakref.ref(one), version(one)) for family, one in large if one is not None}

    def compare_gradients(self, family: Hashable, members: Sequence[torch.Tensor], fired: torch.Tensor) -> None:
        """Look at the gradients of parameters that are about to get new ones; `fired` has just got the first one."""
        if family in self._looked:
            return
        if not self._looked:
            self._looks += 1
            self._look_at(self._strangers())
        self._looked.add(family)
        self.known = True
        self._look_at(members, fired)
        held, counted = self._was.get(family, (_nothing, 0))
        if self._first.get(family) is fired and held() is _grad(fired):
            # Its new gradient has been added to what was there: to zeros, if those of the others are zeros.
            others = {id(one) for one in members if one.grad is not None and one is not fired}
            kept = {id(self._live.parameter(name)) for name in self.kept}
            if version(_grad(fired)) == counted + 1 or not others or others & kept:
                self._keep([fired])
        self._first[family] = fired

    def _strangers(self) -> list[torch.Tensor]:
        """Parameters in no optimizer, which nobody may ever zero."""
        if not self._versions:
            return []
        mine = {id(p) for one in self._live.optimizers for group in one.param_groups for p in group["params"]}
        return [param for _, param in self._live.named_parameters() if id(param) not in mine]

    def _look_at(self, params: Iterable[torch.Tensor], fired: torch.Tensor | None = None) -> None:
        there = [param for param in params if param.grad is not None and param is not fired]
        there = [param for param in there if id(param) in self._versions]
        # Reading values takes a while: where all have been zeroed in place, they most probably are again.
        if there and self._looks & (self._looks - 1):
            there = [param for param in there if self._versions[id(param)] == version(_grad(param))]
        norms = torch._foreach_norm([_grad(param) for param in there], torch.inf) if there else []
        self._keep([param for param, norm in zip(there, norms, strict=True) if norm.item()])

    def _keep(self, params: list[torch.Tensor]) -> None:
        names = {id(param): name for name, param in self._live.named_parameters()}
        found = {names[id(param)] for param in params} - self.kept
        if not found:
            return
        _log.info(
            "memckpt: gradients of %d parameter(s), %s among them, are neither dropped nor zeroed before the next "
            "backward: they are copied with each record. Where that is not meant, zero them, or freeze the parameters",
            len(found),
            min(found),
        )
        self._live.growth.changing |= {f"{GRADIENTS}.{name}" for name in found}
        self._live.note_changes()


def _nothing() -> None:
    return None


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def describe_gradients(live: LiveState) -> dict[str, Any]:
    """Input of :func:`restore_gradients`, for the rank state: the common case, and exceptions by name."""
    present: list[str] = []
    absent: list[str] = []
    others: list[list[Any]] = []
    dense: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, param in live.named_parameters():
        gradient = param.grad
        if gradient is None:
            absent.append(name)
            continue
        if gradient.dtype == param.dtype and not gradient.is_sparse:
            present.append(name)
        else:
            others.append([name, _kind(gradient)])
        if not gradient.is_sparse and not is_dtensor(gradient):
            dense.append((name, param, gradient))
    usual = len(present) > len(absent)
    found = {"usual": usual, "unusual": absent if usual else present, "others": others, "known": live.left.known}
    nbytes = sum(gradient.nbytes for *_, gradient in dense)
    few = nbytes <= (FEW_BYTES if live.left.known else UNKNOWN_BYTES)
    if few and dense:
        by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, _, gradient in dense:
            by_dtype.setdefault(gradient.dtype, []).append((name, gradient.detach().reshape(-1)))
        found["values"] = [
            [[name for name, _ in each], torch.cat([flat for _, flat in each])] for each in by_dtype.values()
        ]
    # Runs for each gradient of each step: a counter is read without a call.
    live.left.committed({} if nbytes <= FEW_BYTES else {id(param): one._version for _, param, one in dense})
    found["unknown"] = not few and not live.left.known
    return found


def _kind(gradient: torch.Tensor) -> Kind:
    if gradient.is_sparse:
        return ["sparse", dtype_name(gradient.dtype), gradient.sparse_dim()]
    return ["dense", dtype_name(gradient.dtype)]


@torch.no_grad()
def restore_gradients(live: LiveState, described: dict[str, Any]) -> None:
    """Give every parameter that had a gradient its values, or zeros if they were dropped, and None to every other."""
    unusual = set(described["unusual"])
    others = dict(described["others"])
    carried = {name: (values, at) for names, values in described.get("values", ()) for name, at in _places(live, names)}
    kept = live.left.kept
    for name, param in live.named_parameters():
        if name in others:
            kind = others[name]
        elif described["usual"] != (name in unusual):
            kind = ["dense", dtype_name(param.dtype)]
        else:
            kind = None
        gradient = live.left.take_restored(name) if name in kept and kind is not None else _zeros(param, kind)
        if name in carried and gradient is not None:
            values, at = carried[name]
            gradient.copy_(values[at : at + param.numel()].view(param.shape))
        give_gradient(param, gradient)  # type: ignore[arg-type]  # a parameter
    live.left.known = described.get("known", False)


def _places(live: LiveState, names: Sequence[str]) -> Iterable[tuple[str, int]]:
    sizes = {name: param.numel() for name, param in live.named_parameters()}
    at = 0
    for name in names:
        yield name, at
        at += sizes[name]


def _zeros(param: torch.Tensor, kind: Kind) -> torch.Tensor | None:
    if kind is None:
        return None
    dtype = dtype_of(kind[1])
    if kind[0] == "dense" or is_dtensor(param):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    dims = kind[2]
    return torch.sparse_coo_tensor(
        torch.empty((dims, 0), dtype=torch.int64, device=param.device),
        torch.empty((0, *param.shape[dims:]), dtype=dtype, device=param.device),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
    )
