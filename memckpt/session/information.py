"""What a session tells about itself."""

from __future__ import annotations

from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.stall_clock import StallClock
from memckpt.config import RedoMode
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.gradient_tap import GradientTap
from memckpt.session.link import AgentLink
from memckpt.session.local_training import LocalTraining
from memckpt.session.mode import ModeChoice
from memckpt.session.peers import Peers
from memckpt.session.protection import Protection
from memckpt.session.ranks import Ranks
from memckpt.session.report import describe_protection
from memckpt.session.resume_check import VERDICT_VALUES, ResumeCheck
from memckpt.session.resume_proof import ResumeProof


class Information:
    """Figures and words about a session, read from its parts."""

    _clock: StallClock
    _link: AgentLink
    _live: LiveState
    _mode: ModeChoice
    _peers: Peers
    _proof: ResumeProof
    _protection: Protection
    _ranks: Ranks
    _recorder: Recorder
    _stalled_before: float
    _switch: GenerationSwitch
    _tap: GradientTap
    _training: LocalTraining

    @property
    def mode(self) -> RedoMode:
        """Current redo mode."""
        return self._mode.mode

    @property
    def mode_reason(self) -> str:
        """Why this mode, in words."""
        return self._mode.reason

    @property
    def check(self) -> ResumeCheck:
        """Verdict of this attempt's resume check."""
        return self._proof.check

    @property
    def tap_reason(self) -> str:
        """Why this tap, in words."""
        return self._tap.reason

    @property
    def caveats(self) -> list[str]:
        """Limits of exactness and of checks in this run, one line each."""
        return self._training.caveats

    @property
    def stored_step(self) -> int | None:
        """Newest step that this attempt's agent has written to storage; None before the first."""
        return self._protection.stored_step

    @property
    def drift_ulp(self) -> float:
        """Largest difference between replica and live state that the audit has found, in ulp."""
        return self._protection.drift.largest_ulp

    def metrics(self) -> dict[str, float]:
        """Milliseconds of stall since the last call, records not yet applied, drift in ulp, newest record, verdict."""
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        lag = 0.0
        if self._link.up and self._switch.request.mode == "eager":
            lag = float(max(0, self._recorder.record - 1 - self._link.client.applied))
        return {
            "stall_ms": stalled * 1e3,
            "lag_steps": lag,
            "drift_ulp": self.drift_ulp,
            "step": float(self._recorder.record - 1),
            "resume_check": VERDICT_VALUES[self.check.verdict],
        }

    @property
    def stall(self) -> StallClock:
        """Seconds that the training thread has spent in the session, by cause."""
        return self._clock

    @property
    def agent_pid(self) -> int | None:
        """Process id of this node's agent; None while there is none."""
        return self._link.agent_pid

    def describe(self) -> str:
        """One line about the protection of this run: mode, tap, memory, agent, caveats."""
        tap, where = self._tap.name, f"on node {self._ranks.node}, agent pid {self.agent_pid}{self._peers.describe()}"
        return describe_protection(self._live.spec(self._switch.request), self.mode_reason, tap, where, self.caveats)
