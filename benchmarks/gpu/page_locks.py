"""Memory for slots in huge pages and in ordinary ones (``python -m benchmarks.gpu.page_locks``).

The agent reserves it; a process that has not touched it yet, as each attempt, locks it and copies to it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report
from memckpt.capture.copier import Copier, copier_for
from memckpt.memory import region as memory
from memckpt.memory.region import Region, Reservation

TITLE = "Memory for slots: reserved, page-locked, copied to"
METHOD = """\
GB/s, the median of the rounds. *reserve*: as the agent does. *touch*: a mapping of it whose pages are touched one by
one. *lock*: another one, not touched yet, as each attempt has it. *copy*: from the device, in parts of 32 MiB."""
ROUNDS = 3
PART = 32 << 20
#: MADV_COLLAPSE, and advice that no kernel knows.
KINDS = {"huge": memory._MADV_COLLAPSE, "ordinary": -1}


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """GB/s of some work on so many bytes."""
    started = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - started) / 1e9


def huge_bytes(region: Region) -> int:
    """Bytes of a region that are in huge pages, as a mapping sees it that can have them."""
    with memory.mapped_for_huge_pages(region.fd, 0, region.nbytes) as address:
        for offset in range(0, region.nbytes, memory.HUGE_PAGE):
            ctypes.string_at(address + offset, 1)  # mapped from now on
        text = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    return int(text.partition("ShmemPmdMapped:")[2].split()[0]) << 10


def measure(nbytes: int, device: torch.device) -> list[float | None]:
    """Share of huge pages (%) and rates of one reservation, in the table's order; None where there is no device."""
    with closing(Region.lay_out("page-locks", nbytes)) as made:

        def reserve() -> None:
            with closing(Reservation("page-locks", [(made, 0, nbytes)])) as reservation:
                reservation.finish()

        reserved = rate(nbytes, reserve)
        rates: list[float | None] = [100 * huge_bytes(made) / nbytes, reserved]
        with closing(Region.open(os.dup(made.fd))) as touched:
            rates.append(rate(nbytes, touched._populate))
        if device.type == "cpu":
            return [*rates, None, None]
        copier = copier_for(device)
        with closing(Region.open(os.dup(made.fd))) as locked:
            rates.append(rate(nbytes, lambda: copier.adopt(locked)))
            rates.append(rate(nbytes, functools.partial(_copy, copier, locked, device)))
    return rates


def _copy(copier: Copier, region: Region, device: torch.device) -> None:
    place = torch.frombuffer(region.map, dtype=torch.uint8)
    source = torch.ones(PART, dtype=torch.uint8, device=device)
    for start in range(0, region.nbytes, PART):
        copier.copy(place[start : start + PART], source)
    copier.token()()
    copier.wait_before_changes()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page_locks")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="little memory, not for quoting")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    options = Options.of("gpu.page_locks", args.quick, args.results, f" --device {args.device}")
    report: Report = options.report(TITLE, METHOD, "pages", "huge, %", "reserve", "touch", "lock", "copy")
    device, nbytes = torch.device("cuda:0" if args.device == "cuda" else "cpu"), PART if args.quick else 4 << 30
    found: dict[str, list[list[float | None]]] = {kind: [] for kind in KINDS}
    for _ in range(1 if args.quick else ROUNDS):
        for kind, advice in KINDS.items():  # by turns
            at_once = 0 if args.quick else memory.AT_ONCE_BYTES
            with mock.patch.multiple(memory, _MADV_COLLAPSE=advice, AT_ONCE_BYTES=at_once):
                found[kind].append(measure(nbytes, device))
    for kind, rounds in found.items():
        rates = [[rate for rate in column if rate is not None] for column in zip(*rounds, strict=True)]
        medians = [statistics.median(column) if column else None for column in rates]
        cells = ("" if median is None else f"{median:.3g}" for median in medians)
        report.add(kind, *cells, pages=kind, huge=medians[0], gb_per_second=medians[1:])
    report.write()


if __name__ == "__main__":
    main()
