"""Environments in which a repeated step was equal: what ``resume_check="auto"`` is for one attempt."""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
from dataclasses import replace
from pathlib import Path

from memckpt.config import MemckptConfig
from memckpt.session.ranks import Ranks

_log = logging.getLogger("memckpt")
#: File in the run directory; each line: digest of an environment, and its attempts since a repeated step was equal.
FILE = "proven"
#: Number of attempts after which a step is repeated again.
AGAIN = 10
#: Number of environments that are kept.
_MOST = 64
_LIBRARIES = ("memckpt", "torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")


class ProvenEnvironments:
    """Resolves ``"auto"`` for one attempt: a step is repeated until one was equal, and each tenth time; collective.

    Attributes:
        config: the settings, with ``"replay"`` or ``"witness"`` in place of ``"auto"``.
    """

    def __init__(self, config: MemckptConfig, run_dir: Path, ranks: Ranks) -> None:
        self._file = run_dir / FILE
        self._digest = ""
        self._writes = ranks.rank == 0
        self.config = config
        if config.resume_check != "auto":
            return
        self._digest = _digest(config, ranks.world_size)
        attempts = ranks.gather(self._noted().get(self._digest, AGAIN))[0]
        self.config = replace(config, resume_check="witness" if attempts < AGAIN else "replay")
        if attempts < AGAIN:
            self._write(attempts + 1)

    def _noted(self) -> dict[str, int]:
        try:
            lines = [line.split() for line in self._file.read_text(errors="replace").splitlines()]
        except OSError:  # nothing is proven; the other ranks wait for this one's answer
            return {}
        return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}

    def note_equal(self) -> None:
        """Note that a repeated step was equal in this environment."""
        self._write(1)

    def put_off(self) -> None:
        """Have the next attempt repeat no step: this one could not go on behind it."""
        self._write(AGAIN - 1)

    def _write(self, attempts: int) -> None:
        if not self._digest or not self._writes:
            return
        noted = self._noted()
        noted.pop(self._digest, None)
        noted[self._digest] = attempts
        written = self._file.with_name(f"{FILE}.new")
        try:
            written.write_text("".join(f"{one} {count}\n" for one, count in list(noted.items())[-_MOST:]))
            written.replace(self._file)
        except OSError as error:
            _log.info("memckpt: each resume repeats its last step, as that it was equal cannot be noted: %s", error)


def _digest(config: MemckptConfig, world_size: int) -> str:
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    libraries = [(name, getattr(sys.modules[name], "__version__", "")) for name in _LIBRARIES if name in sys.modules]
    known = [script.name, sys.argv[1:], platform.python_version(), libraries, repr(config), world_size]
    digest = hashlib.blake2b(repr(known).encode(), digest_size=16)
    digest.update(script.read_bytes() if script.is_file() else b"")
    return digest.hexdigest()
