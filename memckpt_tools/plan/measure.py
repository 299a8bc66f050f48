"""Rates of this machine for ``memckpt plan --measure``: less than a minute in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memckpt.errors import ConfigurationError, StorageError
from memckpt_tools.plan.link import link_rate, parse_address

_COPY_BYTES, _ENCODE_BYTES, _DISK_BYTES = 256 << 20, 64 << 20, 256 << 20
_REDO_ELEMENTS = 8 << 20
#: Time after which a rate is not measured again.
_SECONDS = 1.5


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        facts: fields of a :class:`~memckpt_tools.planning.job.Job`.
        notes: the same in words.
    """

    facts: dict[str, Any]
    notes: list[str]


def measure_machine(directory: Path, link: str | None, tell: Callable[[str], object]) -> Measured:
    """Time this machine: a copy in memory, redo of AdamW, encoding, writing a file, and a link if one is named.

    Rates are of one thread for copy and encode, of torch's threads for redo. Copies from an accelerator are not
    measured: the rate of a copy in memory counts for machines without one.

    Args:
        directory: where a file is written; it is deleted.
        link: HOST:PORT of a `memckpt plan --listen`; None: no link is measured.
        tell: told what is being measured.

    Raises:
        ConfigurationError: `directory` is none, or `link` no address. StorageError, PeerError: it cannot be measured.
    """
    address = None if link is None else parse_address("--link", link)
    if not directory.is_dir():
        raise ConfigurationError(f"--directory: expected a directory, found {directory}")
    facts: dict[str, Any] = {}
    tell("measuring: copy in memory")
    copied = copy_rate()
    tell("measuring: redo of AdamW")
    redone, on_accelerator = redo_rate()
    tell("measuring: encoding")
    encoded = encode_rate()
    tell(f"measuring: disk at {directory}")
    written = disk_rate(directory)
    facts |= {"disk_bytes_per_second": written, "encode_bytes_per_second": encoded}
    notes = [
        f"measured: copy in memory {copied / 1e9:.2f} GB/s (one thread)",
        f"measured: redo of AdamW {redone / 1e6:.0f}M parameters/s on the CPU",
        f"measured: encoding with k=4, m=2 {encoded / 1e9:.2f} GB/s (one thread)",
        f"measured: disk {written / 1e9:.2f} GB/s with fsync, of this machine alone",
    ]
    facts["agent_redo_parameters_per_second"] = redone
    if not on_accelerator:
        facts |= {"copy_bytes_per_second": copied, "redo_parameters_per_second": redone, "gpus_per_node": 0}
    if address is not None:
        tell(f"measuring: link to {link}")
        sent = link_rate(*address)
        facts["network_bytes_per_second"] = sent
        notes.append(f"measured: link to {link} {sent / 1e9:.2f} GB/s (one connection, not encrypted)")
    return Measured(facts, notes)


def _rate(amount: float, action: Callable[[], object]) -> float:
    """Amount per second of the fastest of several turns, at least two."""
    best, started = 0.0, time.perf_counter()
    turns = 0
    while turns < 2 or time.perf_counter() - started < _SECONDS:
        before = time.perf_counter()
        action()
        best = max(best, amount / max(time.perf_counter() - before, 1e-9))
        turns += 1
    return best


def copy_rate(nbytes: int = _COPY_BYTES) -> float:
    """Bytes per second that one thread copies in memory."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _rate(nbytes, lambda: np.copyto(target, source))


def encode_rate(nbytes: int = _ENCODE_BYTES) -> float:
    """Bytes per second that one thread encodes with k = 4, m = 2."""
    import numpy as np

    from memckpt.replication.coding.code import STRIPE_BYTES, Code

    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data
    with closing(Code(4, 2)) as code:

        def encode() -> None:
            for start in range(0, nbytes, STRIPE_BYTES):
                code.encode(source[start : start + STRIPE_BYTES])

        return _rate(nbytes, encode)


def redo_rate(elements: int = _REDO_ELEMENTS) -> tuple[float, bool]:
    """Parameters per second that AdamW advances by a step on the CPU, and whether there is an accelerator."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(elements))
    parameter.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    return _rate(elements, optimizer.step), torch.cuda.is_available()


def disk_rate(directory: Path, nbytes: int = _DISK_BYTES) -> float:
    """Bytes per second of a file that is written and synced.

    Raises:
        StorageError: it cannot be written, or there is too little room for a rate.
    """
    from memckpt.storage.local_store import LocalStore
    from memckpt_tools.doctor.probes import try_disk

    found = try_disk(LocalStore(directory), nbytes)
    if found.bytes_per_second is None:
        raise StorageError(f"--directory {directory}: {found.problem or 'too little room to measure a rate'}")
    return found.bytes_per_second
