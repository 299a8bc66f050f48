"""Stripes of records, and ways to encode them for peers; ISA-L's own routine among them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from memckpt.replication.coding.code import STRIPE_BYTES, Code
from memckpt.replication.coding.fragments import Candidate, decode_stripe, seal_stripe

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
        self.first = self._array.data[:STRIPE_BYTES]

    @property
    def address(self) -> int:
        return self._array.ctypes.data

    def time(self, side: Side) -> float:
        """Seconds of a side for all stripes."""
        view, address = self._array.data, self.address
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
