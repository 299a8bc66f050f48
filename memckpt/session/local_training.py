"""One rank's training, for the classes of its session."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.stall_clock import StallClock
from memckpt.config import MemckptConfig
from memckpt.session.ranks import Ranks


@dataclass(frozen=True)
class LocalTraining:
    """Objects that the classes of a session share. Owns nothing that has to be closed.

    Attributes:
        config: settings of the session.
        ranks: ranks of the job, and this one's place among them.
        live: parameters, optimizer state and buffers that are trained.
        device: device of the live tensors.
        copier: copies from that device to host memory.
        recorder: collects the current record.
        caveats: limits of exactness and of checks, one line each.
    """

    config: MemckptConfig
    ranks: Ranks
    live: LiveState
    device: torch.device
    copier: Copier
    recorder: Recorder
    caveats: list[str] = field(default_factory=list)

    @property
    def clock(self) -> StallClock:
        """Seconds that the training thread has spent in the session, by cause."""
        return self.recorder.clock
