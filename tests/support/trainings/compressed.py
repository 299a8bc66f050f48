"""Compression in trainings with adapters: undisturbed ones average by the plain hook; what records hold is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from memckpt import Session, compression
from memckpt.config import CompressionConfig


def average_plainly(model: Any, config: CompressionConfig) -> None:
    """Average the gradients of a DDP model in compressed form, without memckpt's checkpoints."""
    assert isinstance(model, DistributedDataParallel)
    params = [param for param in model.module.parameters() if param.requires_grad]
    model.register_comm_hook(compression.state(config, params), compression.hook)


def note_encodings(path: Path) -> None:
    """Have each commit of this process append how the record's gradients are encoded."""
    commit = Session.commit

    def noting(self: Session, *args: Any, **kwargs: Any) -> bool:
        done = commit(self, *args, **kwargs)
        writer = self._staging.writer
        if done and writer is not None:
            kinds = [None if one is None else one.kind for one in writer.spec.encodings]
            with path.open("a") as file:
                file.write(json.dumps(kinds) + "\n")
        return done

    Session.commit = noting  # type: ignore[method-assign]


def noted_encodings(path: Path) -> list[str | None]:
    """How the gradients of all parameters were encoded, in each of many records alike."""
    lines = path.read_text().splitlines()
    assert len(lines) > 8, f"expected many records, found {len(lines)}"
    (alike,) = set(lines)
    found: list[str | None] = json.loads(alike)
    return found
