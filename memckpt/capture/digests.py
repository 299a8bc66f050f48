"""Digests of tensors that should be equal on several ranks, so that one copy can stand for all.

In host memory the digest is xxh3 of the bytes. On a device it is two sums, modulo 2^64, of 32-bit words times 64-bit
keys by position. Integer sums do not depend on the order of additions; two tensors that differ collide with a
probability of about 2^-64. The host does not wait for the device: the sums are fetched like tensors in slots.

Ranks compare without a message. The digests of record n lie in memory that all ranks of a slot map. At the end of n + 1
a rank is through a reduction that every rank entered after its commit of n; with an accelerator, whose host runs ahead,
at the end of n + 2. So all ranks find a difference at the end of the same record, and begin a generation there. Other
units may be two records ahead by then, with an accelerator three; hence D is at least 3, or 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from memckpt.capture.copier import Copier
from memckpt.state.layout import DIGEST_BYTES
from memckpt.state.tensors import local

#: Words multiplied at once; bounds the temporary, which takes 16 bytes per word.
_CHUNK = 1 << 20
_SUMS = 2
_SEED = 0x6D656D636B7074
_keys: dict[torch.device, torch.Tensor] = {}


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are readable by the host."""
    return tensor.device.type == "cpu"


def digest(tensor: torch.Tensor) -> bytes:
    """xxh3_128 of the bytes, in row-major order, of a tensor in host memory: 16 bytes."""
    return xxhash.xxh3_128_digest(_as_bytes(tensor).numpy().data)


@torch.no_grad()
def sums(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor on a device: int64 of shape ``(2,)``, on that device and on the current stream."""
    words = _as_bytes(tensor)
    rest = words.numel() % 4
    if rest or words.storage_offset() % 4:
        words = torch.cat([words, words.new_zeros((4 - rest) % 4)])
    return _sums(words.view(torch.int32))


def _sums(words: torch.Tensor) -> torch.Tensor:
    keys = _keys_on(words.device)
    parts = [(chunk * keys[:, : chunk.numel()]).sum(1) for chunk in words.split(_CHUNK)]
    return parts[0] if len(parts) == 1 else _sums(torch.stack(parts).view(torch.int32).view(-1))


def _keys_on(device: torch.device) -> torch.Tensor:
    """The keys: int64 of shape ``(2, _CHUNK)``, equal in every process."""
    if device not in _keys:
        generator = torch.Generator("cpu").manual_seed(_SEED)
        made = torch.randint(-(2**63), 2**63 - 1, (_SUMS, _CHUNK), generator=generator, device="cpu")
        _keys[device] = made.to(device)
    return _keys[device]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


class Digests:
    """Digests of some tensors at this point; call :meth:`encode` once the copier's copies are done."""

    def __init__(self, tensors: Sequence[torch.Tensor], copier: Copier) -> None:
        here = [local(tensor) for tensor in tensors]
        self._of_host = [digest(tensor) if on_host(tensor) else None for tensor in here]
        away = [sums(tensor) for tensor in here if not on_host(tensor)]
        self._fetched = copier.fetch(torch.stack(away)) if away else None

    def encode(self) -> bytes:
        """All digests, in order, 16 bytes each."""
        fetched = b"" if self._fetched is None else self._fetched.numpy().tobytes()
        found: list[bytes] = []
        for one in self._of_host:
            if one is None:
                one, fetched = fetched[:DIGEST_BYTES], fetched[DIGEST_BYTES:]
            found.append(one)
        return b"".join(found)
