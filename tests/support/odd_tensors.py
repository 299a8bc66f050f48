"""Tensors whose values are no bytes in one memory, or that raise errors where others answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def _freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.ones(3) > 0)  # type: ignore[no-any-return]


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _left_behind() -> torch.Tensor:
    weight = torch.nn.Parameter(torch.ones(4))
    view, _ = weight.split(2)
    with torch.no_grad():
        weight.mul_(2)
    return view


# Those that are bytes in one memory.
STORED: dict[str, Callable[[], torch.Tensor]] = {
    "inference": _inference,
    "left behind": _left_behind,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.ones(1).expand(5),
    "result": lambda: torch.ones(3, requires_grad=True) * 2,
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
}

NOT_STORED: dict[str, Callable[[], torch.Tensor]] = {
    "freed": _freed,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "two": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
    "fake": _fake,
    "masked": _masked,
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "lazy": lambda: torch.nn.parameter.UninitializedParameter(),
    "batched": lambda: torch._C._functorch._add_batch_dim(torch.ones(3, 2), 0, 1),
}
