"""Throughput of encoding records for peers, compared to ISA-L's own routine, and to a checksum and a copy."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.command import Options, run
from benchmarks.report import Ratio, Report
from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.coding.fragments import Candidate, decode_stripe, seal_stripe

TITLE = "Erasure coding: stripes to pieces, and back from the pieces that take most work"
METHOD = f"""\
One thread, stripes of {STRIPE_BYTES >> 10} KiB of a source that is much larger than the caches, rates in GB/s of the
source. *encode*: pieces that the caller owns. *seal*: the same with checksums, the stripe's digest and
headers. *ISA-L*: its `ec_encode_data` on the same stripes where they lie, parity into one small buffer: it copies
nothing. *checksum and copy*: xxh3_128 of a stripe that was copied to `bytes`. *decode*: always the same last k pieces
of one stripe, which are in the caches, with checksums and digest verified. All sides take turns, each over the whole
source; medians of the rounds, and the median of the rounds' ratios."""

#: (k, m): striping, plain copies, and parity.
CODES = ((3, 1), (1, 3), (2, 2), (4, 2), (8, 2), (4, 3), (8, 4))

SIDES = ("encode", "seal", "ISA-L", "checksum and copy", "decode")

#: Processes a stripe; called with its bytes and its address.
Side = Callable[[memoryview, int], object]


class IsaL:
    """ISA-L's encoder for `data` and `parity` fragments, as bundled with pyeclib.

    Raises:
        OSError: pyeclib does not bundle it.
    """

    def __init__(self, data: int, parity: int) -> None:
        import pyeclib

        found = sorted(Path(pyeclib.__file__).parent.parent.glob("pyeclib.libs/libisal*"))
        if not found:
            raise OSError("no libisal beside pyeclib")
        self._library = ctypes.CDLL(str(found[0]))
        self._data, self._parity = data, parity
        matrix = (ctypes.c_ubyte * ((data + parity) * data))()
        self._library.gf_gen_cauchy1_matrix(matrix, data + parity, data)
        self._tables = (ctypes.c_ubyte * (32 * data * parity))()
        below = (ctypes.c_ubyte * (parity * data)).from_buffer(matrix, data * data)
        self._library.ec_init_tables(data, parity, below, self._tables)
        self._size = STRIPE_BYTES // data
        self.buffers = [ctypes.create_string_buffer(self._size) for _ in range(parity)]
        self._out = (ctypes.c_void_p * parity)(*map(ctypes.addressof, self.buffers))
        self._in = (ctypes.c_void_p * data)()

    def encode(self, address: int) -> None:
        """Write the parity of the stripe at `address` to the buffers."""
        for piece in range(self._data):
            self._in[piece] = address + piece * self._size
        self._library.ec_encode_data(self._size, self._data, self._parity, self._tables, self._in, self._out)


class Source:
    """Stripes to encode, in memory much larger than the caches."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self.nbytes = nbytes
        self.first = memoryview(self._array)[:STRIPE_BYTES]

    @property
    def address(self) -> int:
        return self._array.ctypes.data

    def time(self, side: Side) -> float:
        """Seconds of a side for all stripes."""
        view, address = memoryview(self._array), self.address
        began = time.perf_counter()
        for at in range(0, self.nbytes, STRIPE_BYTES):
            side(view[at : at + STRIPE_BYTES], address + at)
        return time.perf_counter() - began


def sides_of(code: Code, source: Source) -> dict[str, Side]:
    """The sides for one code, by name; without ISA-L if there is no parity.

    Raises:
        OSError: ISA-L is not found.
    """
    seal = partial(seal_stripe, code, generation="generation", owner=(0,), record=1, stripe=0, stripes=1)
    sealed = [Candidate(f"node{piece}", *each) for piece, each in enumerate(seal(source.first))]
    last = sealed[-code.data :]
    decode = partial(decode_stripe, code, last, generation="generation", owner=(0,), record=1, stripe=0, stripes=1)
    sides: dict[str, Side] = {
        "encode": lambda stripe, _: code.encode(stripe),
        "seal": lambda stripe, _: seal(stripe),
        "checksum and copy": lambda stripe, _: xxhash.xxh3_128_digest(bytes(stripe)),
        "decode": lambda stripe, _: decode(length=len(stripe)),
    }
    if code.data > 1 and code.tolerate > 1:
        isal = IsaL(code.data, code.tolerate - 1)
        isal.encode(source.address)
        assert [each.raw for each in isal.buffers] == code.encode(source.first)[code.data :], "not the same code"
        sides["ISA-L"] = lambda _, address: isal.encode(address)
    return sides


def take_turns(source: Source, sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of every side in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 else reversed(sides):
            seconds[name].append(source.time(sides[name]))
    return seconds


def main(options: Options) -> None:
    report = Report("encode", TITLE, METHOD, options.command, options.quick)
    source = Source((16 if options.quick else 256) << 20)
    table = report.table(
        f"{source.nbytes >> 20} MiB in stripes of {STRIPE_BYTES >> 10} KiB, GB/s", "k, m", *SIDES,
        "encode's time, of ISA-L's", "seal's time, of checksum and copy's",
    )  # fmt: skip
    for data, tolerate in CODES:
        with closing(Code(data, tolerate)) as code:
            try:
                sides = sides_of(code, source)
            except OSError as error:
                report.leave_out(f"k={data}, m={tolerate}", str(error))
                continue
            seconds = take_turns(source, sides, 3 if options.quick else 7)
        rates = {name: source.nbytes / statistics.median(each) / 1e9 for name, each in seconds.items()}
        ratios = [
            Ratio.of(list(zip(seconds[ours], seconds[other], strict=True))) if other in seconds else None
            for ours, other in (("encode", "ISA-L"), ("seal", "checksum and copy"))
        ]
        table.add(
            f"{data}, {tolerate}", *(f"{rates[name]:.2f}" if name in rates else "-" for name in SIDES),
            *(f"{each.ratio:.2f} +- {each.spread:.2f}" if each else "-" for each in ratios),
            data=data, tolerate=tolerate, gigabytes_per_second=rates, seconds=seconds,
        )  # fmt: skip
    report.write(options.results)


if __name__ == "__main__":
    run("encode", main)
