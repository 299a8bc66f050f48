"""Environments in which a resume of the run has been proved by a repeated step: what ``resume_check="auto"`` goes by.

What a sample of the state cannot see (data position, generators, links between objects) shows in the next step. It does
so in the first resume as well as in any later one, as long as script, versions and settings stay the same.
"""

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
#: File in the run directory: digests of environments, one a line.
FILE = "proven"
_LIBRARIES = ("memckpt", "torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")


class ProvenEnvironments:
    """Resolves ``"auto"`` for one attempt: the last step is repeated until a repeated step has been equal; collective.

    Args:
        config: settings of the attempt.
        run_dir: the run directory.
        ranks: ranks of the job; the first one's directory counts.

    Attributes:
        config: the settings, with ``"replay"`` or ``"witness"`` in place of ``"auto"``.
    """

    def __init__(self, config: MemckptConfig, run_dir: Path, ranks: Ranks) -> None:
        self._file = run_dir / FILE
        self._digest = ""
        self.config = config
        if config.resume_check == "auto":
            self._digest = _digest(config, ranks.world_size)
            known = ranks.gather(self._digest in self._noted())
            self.config = replace(config, resume_check="witness" if known[0] else "replay")
        self._writes = ranks.rank == 0

    def _noted(self) -> list[str]:
        try:
            return self._file.read_text(errors="replace").split()
        except OSError:  # nothing is proven; the other ranks wait for this one's answer
            return []

    def note(self) -> None:
        """Note that a repeated step was equal in this environment."""
        if not self._digest or not self._writes:
            return
        try:
            with self._file.open("a") as file:
                file.write(f"{self._digest}\n")
        except OSError as error:
            _log.info("memckpt: each resume repeats its last step, as that it was equal cannot be noted: %s", error)


def _digest(config: MemckptConfig, world_size: int) -> str:
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    libraries = [(name, getattr(sys.modules[name], "__version__", "")) for name in _LIBRARIES if name in sys.modules]
    known = [script.name, sys.argv[1:], platform.python_version(), libraries, repr(config), world_size]
    digest = hashlib.blake2b(repr(known).encode(), digest_size=16)
    digest.update(script.read_bytes() if script.is_file() else b"")
    return digest.hexdigest()
