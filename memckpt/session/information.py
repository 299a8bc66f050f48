"""What a session tells about itself."""

from __future__ import annotations

import time

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
from memckpt.session.report import RestoreReport, describe_protection
from memckpt.session.restoration import Restoration
from memckpt.session.resume_check import VERDICT_VALUES, ResumeCheck
from memckpt.session.resume_proof import ResumeProof
from memckpt.session.staging import Staging


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
    _restoration: Restoration
    _staging: Staging
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
    def report(self) -> RestoreReport | None:
        """What :meth:`restore` has returned, with what has shown since; None where training started over."""
        return self._restoration.report

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

    @property
    def logs_metrics(self) -> bool:
        """Whether adapters give :meth:`metrics` to the framework's loggers."""
        return self._training.config.log_metrics

    def metrics(self) -> dict[str, float]:
        """Figures for loggers, always the same ones: `docs/observability.md` describes them.

        They are what this process knows, without asking anybody. `stall_ms` is that since the last call.
        """
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        lag = 0.0
        if self._link.up and self._switch.request.mode == "eager":
            lag = float(max(0, self._recorder.record - 1 - self._link.connection.applied))
        return {
            "stall_ms": stalled * 1e3,
            "lag_steps": lag,
            "drift_ulp": self.drift_ulp,
            "step": float(self._recorder.record - 1),
            "resume_check": VERDICT_VALUES[self.check.verdict],
            **self._tiers(),
            **self._attempt(),
        }

    def _tiers(self) -> dict[str, float]:
        protection, writer = self._protection, self._staging.writer
        lag = 0.0
        if self._peers.active and self._link.up:
            lag = float(max(0, self._recorder.record - 1 - self._link.connection.watermark))
        return {
            "stored_step": float(protection.stored_step or 0),
            "stored_age_s": time.monotonic() - protection.stored_at,
            "stored_bytes": float(protection.stored_bytes),
            "peers_lag_records": lag,
            "held_bytes": float(writer.layout.total_bytes) if writer is not None else 0.0,
            "alarms": float(protection.alarms),
        }

    def _attempt(self) -> dict[str, float]:
        report = self._restoration.report
        return {
            "attempt": float(self._link.attempt),
            "recovery_s": report.seconds if report is not None else 0.0,
            "steps_lost": float(report.steps_lost or 0) if report is not None else 0.0,
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
