"""What a cold start has imported, so that a warm process can import it ahead. Torch-free."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

#: Set in a process that was forked from a warm one: its modules are not a cold start's.
forked = False


class Module(msgspec.Struct, frozen=True, array_like=True):
    """A module's name, and the file that it came from."""

    name: str
    origin: str


class Recorded(msgspec.Struct, frozen=True):
    """A training's process after its first commit. `changed`: variables set since its start; None: removed."""

    modules: list[Module]
    path: list[str]
    changed: dict[str, str | None]


def record_imports() -> bytes:
    """What this process has imported so far: a :class:`Recorded` as JSON."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    modules = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if (
            spec is None
            or spec.name != name
            or spec is main
            or not isinstance(origin, str)
            or not os.path.isabs(origin)
        ):
            continue
        modules.append(Module(name, origin))
    path = [each for each in sys.path if isinstance(each, str)]
    return msgspec.json.encode(Recorded(modules, path, _changed()))


def _changed() -> dict[str, str | None]:
    """Variables of the environment that differ from those at the start of the process."""
    found = Path("/proc/self/environ").read_bytes().split(b"\0")
    before = dict(os.fsdecode(each).split("=", 1) for each in found if b"=" in each)
    now = dict(os.environ)
    return {name: now.get(name) for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)}
