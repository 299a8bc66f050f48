"""Regions lie on all NUMA nodes: what is asked of the kernel, which has a single node where tests run."""

from __future__ import annotations

import ctypes
import os
from contextlib import closing
from typing import Any

import pytest

from memckpt.memory import region
from memckpt.memory.region import Region

NBYTES = 1 << 20


def policy_of(there: Region) -> int:
    mode = ctypes.c_int(-1)
    at_address = ctypes.c_ulong(2)
    code = region._libc.syscall(
        region._GET_MEMPOLICY,
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(there.address),
        at_address,
    )
    if code:
        pytest.skip("the kernel does not tell policies of memory here")
    return mode.value


@pytest.mark.skipif(not region._MBIND, reason="the system call is known for x86_64 and aarch64")
@pytest.mark.parametrize("nodes", [0b1, 0b11])
def test_memory_is_spread_for_whoever_maps_it(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page after the other is taken from the next node, also where the descriptor is reserved or mapped again."""
    monkeypatch.setattr(region, "_memory_nodes", lambda: nodes)
    with closing(Region.create("slots", NBYTES)) as made, closing(Region.open(os.dup(made.fd))) as opened:
        expected = region._INTERLEAVE if nodes > 1 else region._BY_DEFAULT
        assert policy_of(made) == policy_of(opened) == expected
        opened.map[:NBYTES] = bytes(range(256)) * (NBYTES // 256)
        assert made.map[NBYTES - 2 :] == bytes([254, 255])


@pytest.mark.skipif(not region._MBIND, reason="the system call is known for x86_64 and aarch64")
def test_a_process_s_own_policy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Libc:
        def syscall(self, number: int, mode: Any, *rest: Any) -> int:
            calls.append(number)
            mode._obj.value = 2  # bound, as numactl --membind does
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(libc, name)

    libc = region._libc
    monkeypatch.setattr(region, "_memory_nodes", lambda: 0b11)
    monkeypatch.setattr(region, "_libc", Libc())
    Region.create("slots", NBYTES).close()
    assert calls == [region._GET_MEMPOLICY]
