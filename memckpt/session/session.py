"""A session: one training process's protection, from attach to close."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.agent.address import AgentAddress
from memckpt.agent.client import PreparedRegions
from memckpt.agent.messages import Alarm, Begin, Drift, Gap, Protected, Saved, SaveFailed, Void
from memckpt.capture import gradient_ops
from memckpt.capture.copier import copier_for
from memckpt.capture.live_state import LiveState, SpecRequest
from memckpt.capture.recorder import Recorder, StallClock
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps import CommHookTap, ParameterTap, PendingTap, StepHooks
from memckpt.config import MemckptConfig, RedoMode, ResumeChoice, check_resume
from memckpt.errors import AgentGoneError, ForeignStateError, MemckptError, StorageError, UnsupportedError, UsageError
from memckpt.recovery.from_storage import StoredCheckpoint
from memckpt.recovery.plan import Plan, RestoreRecord, RestoreStored, StartOver, make_plan
from memckpt.recovery.restore import Restorer, replica_digest
from memckpt.session.changes import Changes
from memckpt.session.choice import choose_redo, choose_tap
from memckpt.session.link import AgentLink
from memckpt.session.preemption import PreemptionNotice
from memckpt.session.rank_state import RankState, Stateful
from memckpt.session.ranks import Ranks
from memckpt.session.report import HeldState, RestoreReport
from memckpt.session.staging import RestorePoint, Staging
from memckpt.session.storage_tier import StorageTier
from memckpt.state import codec, rng
from memckpt.state.layout import Layout, StateSpec
from memckpt.state.records import HeldRecords

_log = logging.getLogger("memckpt")
#: After an agent could not be started, try again this many records later.
_RETRY_RECORDS = 50


class Session:
    """Protects one model and its optimizers. Made by :func:`memckpt.attach`; not thread-safe.

    Order of calls: attach, ``provide``/``register``, ``restore``, then ``commit`` at each restore point, ``close``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        run_dir: Path,
        resume: ResumeChoice | int,
        config: MemckptConfig,
        data_parallel: DistributedDataParallel | None,
        extra_modules: Mapping[str, nn.Module],
    ) -> None:
        self._config = config
        self._live = LiveState(model, optimizers, extra_modules)
        self._ranks = Ranks()
        if self._ranks.world_size > 1 and data_parallel is None:
            raise UnsupportedError(
                f"{self._ranks.world_size} ranks without DistributedDataParallel: expected the DDP wrapper as "
                "data_parallel (or as the model itself), so that records hold synchronized gradients"
            )
        if self._ranks.world_size > 1 and config.slots < 3:
            raise UnsupportedError(
                f"slots: expected 3 or more with several ranks (their commits differ by one), found {config.slots}"
            )
        self._device = next(p.device for o in optimizers for g in o.param_groups for p in g["params"])
        self._clock = StallClock()
        self._copier = copier_for(self._device)
        self._recorder = Recorder(self._live, self._copier, self._clock)
        self._changes = Changes(self._recorder)
        self._staging = Staging(self._live, self._recorder, self._copier, self._clock, self._changes, self._ranks.rank)
        self._link = AgentLink(AgentAddress.of(run_dir), self._ranks, config)
        self._rank_state = RankState(self._live)
        self._fresh: PreparedRegions | None = None
        self._resumable: PreparedRegions | None = None
        self._generation_after: int | None = None
        self._unprotected_since: int | None = None
        self._retry_at = 0
        self._closed = False
        self._resume_from: RestoreRecord | None = None
        self._stored: StoredCheckpoint | None = None
        self._reductions_at_commit = 0
        self._stalled_before = 0.0
        self.drift_ulp = 0.0
        #: The newest step that this attempt's agent has brought to storage; None before the first.
        self.stored_step: int | None = None
        #: What cannot be made exact or be checked, in words, one line each.
        self.caveats: list[str] = []
        self.held: HeldState | None = None

        self.mode, self.mode_reason = self._agree_on_mode()
        if self.mode == "eager" and self._device.type != "cpu":
            self.caveats.append(
                "the replica is redone on the CPU and may be off by units in the last place; redo='lazy' is exact"
            )
        self._request = self._request_for(self.mode)
        self._step_hooks = StepHooks(optimizers, self._recorder)
        self._tap, self.tap_reason, caveats = choose_tap(
            config, self._live, self._recorder, self._copier, data_parallel, self._link.finish_sending
        )
        self.caveats += caveats
        try:
            self._start(resume, run_dir)
        except BaseException:
            self._abandon()
            raise
        self._step_hooks.install()
        self._tap.install()
        gradient_ops.listen(self)
        self._preemption = PreemptionNotice(self._link.tell_preempted)
        self._preemption.install()
        _raise_oom_score()

    # Start

    def _agree_on_mode(self) -> tuple[RedoMode, str]:
        """Lazy as soon as one rank needs it."""
        own = choose_redo(self._config, self._live, self._device, len(self._ranks.local_ranks))
        modes = self._ranks.gather(own)
        return next((each for each in modes if each[0] == "lazy"), own)

    def _request_for(self, mode: RedoMode) -> SpecRequest:
        return SpecRequest(
            mode=mode,
            period=self._config.anchor_period(mode),
            slots=self._config.slots,
            local_ranks=self._ranks.local_ranks,
            world_size=self._ranks.world_size,
        )

    def _start(self, resume: ResumeChoice | int, run_dir: Path) -> None:
        ranks = self._ranks
        spec = self._live.spec(self._request)
        held = ranks.together(lambda: self._link.connect(spec, self._recorder.record, rejoining=False))
        if self._config.storage is not None:
            ranks.together(lambda: self._await_storage(held[ranks.rank]))
        tier = StorageTier(self._config.storage, run_dir, ranks)
        stored = tier.catalog
        plan: Plan = make_plan(
            held, resume, ranks.world_size, ranks.nonce, stored.complete, latest_attempt=stored.latest_attempt
        )
        self._timeline = plan.timeline
        self._link.configure(plan.timeline, torch.get_num_threads())
        if isinstance(plan, RestoreRecord):
            own = held[ranks.rank]
            ranks.together(lambda: self._open_held(plan, own.ranks))
        elif isinstance(plan, RestoreStored):
            _log.info("memckpt: resuming from storage: %s", plan.reason)
            self._open_stored(tier.open_newest(plan.candidates, spec), spec)
        elif tier.problem and resume != "never":
            raise StorageError(
                f"memory cannot resume this run ({plan.reason}), and storage cannot be looked into: {tier.problem}. "
                "Try again when it can; resume='never' starts over"
            )
        else:
            ranks.together(lambda: self._prepare_fresh(spec, plan))

    def _await_storage(self, held: HeldRecords) -> None:
        """Another number of ranks resumes from storage: see what memory holds get there."""
        if held.records and held.world_size != self._ranks.world_size:
            _log.info("memckpt: record %d goes to storage first: the number of ranks has changed", max(held.records))
            assert self._config.storage is not None
            self._link.wait_saved(max(held.records), self._config.storage.timeout_seconds)

    def _prepare_fresh(self, spec: StateSpec, plan: StartOver) -> None:
        if plan.reason != "resume='never'":
            level = logging.WARNING if plan.discard else logging.INFO
            _log.log(level, "memckpt: starting over: %s", plan.reason)
        self._fresh = self._link.prepare(spec, self._timeline, discard=plan.discard)
        self._recorder.begin(None, 1)
        self._generation_after = 1

    def _open_held(self, plan: RestoreRecord, held_ranks: tuple[int, ...]) -> None:
        if held_ranks != self._ranks.local_ranks:
            # Rank states cannot travel between nodes yet.
            raise ForeignStateError(
                f"node {self._ranks.node} holds the states of ranks {list(held_ranks)}, but in this attempt ranks "
                f"{list(self._ranks.local_ranks)} run there; expected every rank on the node where it was. "
                "Restart with the same placement of ranks, or use resume='never' to drop what is held"
            )
        self._resumable = self._link.resume(plan.record, plan.timeline)
        state = codec.decode(self._resumable.message.rank_states[self._ranks.rank])
        self._resume_from = plan
        self._resume_state = state
        self.held = HeldState(plan.step, plan.record, plan.tier, state["provided"], self._ranks.world_size)
        self._live.growth.take_over(self._resumable.message.spec)
        self._recorder.begin(None, plan.record + 1)

    def _open_stored(self, stored: StoredCheckpoint, spec: StateSpec) -> None:
        checkpoint = stored.checkpoint
        if checkpoint.world_size != self._ranks.world_size:
            _log.warning(
                "memckpt: the run had %d ranks and has %d now: parameters and optimizer state are those of step %d; "
                "what was private to a rank is taken from one that there was, and training does not go on bit for bit",
                checkpoint.world_size,
                self._ranks.world_size,
                checkpoint.step,
            )
        self._stored = stored
        self._resume_state = codec.decode(stored.rank_state)
        self.held = HeldState(
            checkpoint.step, checkpoint.record, "storage", self._resume_state["provided"], checkpoint.world_size
        )
        self._live.growth.take_over(stored.own.spec)
        self._ranks.together(lambda: self._prepare_regions(spec))
        self._recorder.begin(None, checkpoint.record + 1)
        self._generation_after = checkpoint.record + 1

    def _prepare_regions(self, spec: StateSpec) -> None:
        self._fresh = self._link.prepare(spec, self._timeline, discard=True)

    # What belongs to the rank state

    def provide(self, name: str, capture: Callable[[], Any]) -> None:
        """Have `capture()` called at each commit; what it returns is in ``held.rank_state[name]`` after a resume."""
        self._rank_state.provide(name, capture)

    def register(self, name: str, obj: Stateful) -> None:
        """Make an object with ``state_dict`` and ``load_state_dict`` part of what is committed and restored."""
        self._rank_state.register(name, obj)

    # Restore

    def restore(self) -> RestoreReport | None:
        """Put everything back: tensors, optimizer state, registered objects, and as the last thing the RNG states.

        Call it once, right before the training loop. Returns None when there was nothing to restore.
        """
        report = self.restore_tensors()
        if report is not None and self.held is not None:
            self._rank_state.load_registered(self.held.rank_state)
            self.restore_rng()
        return report

    def restore_tensors(self) -> RestoreReport | None:
        """Put parameters, buffers, optimizer state and groups back, in place; the first half of :meth:`restore`."""
        if self._stored is not None:
            return self._restore_stored()
        plan, regions = self._resume_from, self._resumable
        if plan is None or regions is None:
            return None
        started = time.perf_counter()
        self._resumable = None
        message = regions.message
        self._live.restore_trainable(self._resume_state["trainable"])
        self._live.restore_groups(self._resume_state["groups"])
        writer = self._staging.open(regions)
        restorer = Restorer(
            writer.layout,
            regions.slots,
            regions.static,
            regions.replica,
            writer.ring,
            self._live.tensors(),
            self._live.optimizers,
        )
        with rng.preserved():
            restorer.restore(plan.record, self._ranks.rank, message.metas, message.missing, message.plain)
        self._live.restore_state_order(self._resume_state["state_order"])
        self._agree_on_replicas(writer)
        self._staging.adopt(writer)
        if isinstance(self._tap, CommHookTap):
            self._tap.resume_layout(self._resume_state["reduction"])
        if self._live.spec(self._request) == message.spec:
            self._begin_record(plan.record + 1)
        else:
            # Other settings than the last attempt's, or a state that has grown: start a new generation.
            self._recorder.begin(None, plan.record + 1)
            self._generation_after = plan.record + 1
        return RestoreReport(plan.step, plan.record, plan.tier, time.perf_counter() - started, plan.lost)

    def _restore_stored(self) -> RestoreReport:
        """From storage: the next commit writes a generation, and memory protects again."""
        stored, self._stored = self._stored, None
        assert stored is not None
        started = time.perf_counter()
        self._live.restore_trainable(self._resume_state["trainable"])
        self._live.restore_groups(self._resume_state["groups"])
        with rng.preserved():
            stored.restore(self._live.tensors(), self._live.optimizers)
        self._live.restore_state_order(self._resume_state["state_order"])
        checkpoint = stored.checkpoint
        exact = checkpoint.world_size == self._ranks.world_size
        if isinstance(self._tap, CommHookTap) and exact:
            self._tap.resume_layout(self._resume_state["reduction"])
        seconds = time.perf_counter() - started
        return RestoreReport(checkpoint.step, checkpoint.record, "storage", seconds, 0, exact)

    def _agree_on_replicas(self, writer: SlotWriter) -> None:
        """Holders may differ (other kernels, other thread counts): then the first rank's replica is everybody's."""
        if self._ranks.world_size == 1:
            return
        digests = self._ranks.gather(replica_digest(writer.params, self._live.optimizers))
        if len(set(digests)) == 1:
            return
        _log.warning("memckpt: the nodes' replicas differ in bits; every rank takes that of rank 0")
        for param in writer.params:
            self._ranks.broadcast_tensor(param.data, 0)
            for optimizer in self._live.optimizers:
                state = optimizer.state.get(param, {})
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor):
                        self._ranks.broadcast_tensor(state[key], 0)

    def restore_rng(self) -> None:
        """Put the RNG states of torch, numpy and python back; the last thing before training goes on."""
        if self.held is not None:
            rng.restore(self._resume_state["rng"])
            if self._ranks.rank >= self.held.world_size:
                rng.diverge(self._ranks.rank)

    # During a step

    def gradients_change(self, kind: str, operand: Any, params: list[torch.Tensor]) -> None:
        """From :mod:`memckpt.capture.gradient_ops`: gradients are about to be changed in place."""
        self._recorder.gradients_change(kind, operand, params)

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """From :mod:`memckpt.capture.gradient_ops`: the change is made."""
        self._recorder.note_versions(params)

    # Commit

    def commit(self, step: int | None = None, gradients_pending: bool | None = None) -> bool:
        """End a record here, if this is a restore point: after the optimizer's step, with no gradient pending.

        Args:
            step: the framework's step number; None takes the record's number.
            gradients_pending: whether a backward has run whose gradients no step has used yet; None lets the taps
                decide. Where a scaler skipped the step, pass False.

        Returns:
            True if this was a restore point; False if the record goes on (gradients are being accumulated).
        """
        if self._closed:
            raise UsageError("commit() after close(): attach again to go on")
        if self._resumable is not None or self._stored is not None:
            raise UsageError("commit() before restore(): something is held; call session.restore() before training")
        started = time.perf_counter()
        inner = self._clock.total - self._clock.commit
        try:
            if not self._is_restore_point(gradients_pending):
                return False
            # First of all: what user code raises in it leaves everything as it was.
            rank_state = self._rank_state.encode(self._tap.layout if isinstance(self._tap, CommHookTap) else None)
            self._recorder.gradients_pending = False
            if isinstance(self._tap, CommHookTap):
                self._reductions_at_commit = self._tap.reductions
            record = self._recorder.record
            self._commit(RestorePoint(record, record if step is None else step, rank_state))
            return True
        finally:
            inner = self._clock.total - self._clock.commit - inner
            self._clock.commit += time.perf_counter() - started - inner

    def _is_restore_point(self, gradients_pending: bool | None) -> bool:
        pending = self._recorder.gradients_pending if gradients_pending is None else gradients_pending
        # A batch without a reduction of all ranks belongs to the next record: nothing orders the ranks in it.
        unordered = isinstance(self._tap, CommHookTap) and self._tap.reductions == self._reductions_at_commit
        return not pending and not unordered

    def _commit(self, point: RestorePoint) -> None:
        try:
            self._listen()
            if not self._link.up:
                self._try_again(point)
            else:
                self._commit_or_begin(point)
        except AgentGoneError as error:
            self._lose_agent(point.record, str(error))
            self._try_again(point)
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
        if self._recorder.record == point.record:
            self._recorder.begin(None, point.record + 1)

    def _commit_or_begin(self, point: RestorePoint) -> None:
        record = point.record
        self._staging.stage_by_value(record)
        problem = self._find_problem()
        due = self._generation_after
        if due is None and problem is not None:
            due = self._order_generation(record, problem)
        if due is not None and record >= due:
            self._begin_generation(point)
        elif self._staging.ready:
            self._send_commit(point)
            self._obey_order(record)
            self._begin_record(record + 1)
        else:
            self._link.send(Void(record, problem or self._recorder.problem or "no generation to write to"))

    def _obey_order(self, record: int) -> None:
        """Copy the state for a checkpoint, where the agent has asked for it."""
        order = self._link.take_order(record)
        if order is not None:
            self._link.finish_sending()
            self._link.send(self._staging.take_snapshot(order, record))

    def _send_commit(self, point: RestorePoint) -> None:
        finish = self._staging.seal(point)
        if self._copier.asynchronous:
            self._link.send_later(finish)
        else:
            self._link.send(finish())

    def _begin_record(self, record: int) -> None:
        """Go on to the next record, as soon as its slot is free."""
        writer = self._staging.writer
        assert writer is not None
        if writer.spec.mode == "eager":
            self._clock.slot_wait += self._link.wait_applied(record - writer.spec.slots)
        self._staging.begin_record(record)

    def _find_problem(self) -> str | None:
        """Why this record cannot be staged as it stands."""
        if self._recorder.tap_mismatch is not None:
            self._change_tap(self._recorder.tap_mismatch)
        if self._recorder.problem is not None:
            return self._recorder.problem
        changed = self._changes.static_change()
        if changed is not None:
            self._live.growth.changing.add(changed)
            return f"{changed} has changed and is staged with every record from now on"
        return self._changes.problem

    def _order_generation(self, record: int, reason: str) -> int:
        """When the new generation begins: now if this rank is alone, else after a record that all local ranks reach."""
        _log.info("memckpt: a new generation begins: %s", reason)
        if self._ranks.world_size == 1:
            return record
        self._generation_after = self._link.client.ask_for_generation(record + 1, reason)
        return self._generation_after

    def _change_tap(self, reason: str) -> None:
        self._recorder.tap_mismatch = None
        self._recorder.streams = False
        self.tap_reason = reason
        _log.warning("memckpt: gradients are now taken after the optimizer's step: %s", reason)
        if isinstance(self._tap, ParameterTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            self._tap = PendingTap(params, self._recorder)
            self._tap.install()

    # Generations

    def _begin_generation(self, point: RestorePoint) -> None:
        """Write the whole state by value; the log goes on from here."""
        record = point.record
        self._link.finish_sending()
        started = time.perf_counter()
        writer, commit = self._staging.write_generation(self._regions_for_generation(), point)
        try:
            self._link.client.applied = record
            self._link.send(commit)
        except BaseException:
            writer.close()
            raise
        self._staging.adopt(writer)
        self._generation_after = None
        self._changes.problem = None
        self._recorder.check.restart()
        if isinstance(self._tap, (ParameterTap, PendingTap)):
            self._tap.remove()  # parameters may have been unfrozen since
            self._tap.install()
        if self._unprotected_since is not None:
            gap = record - self._unprotected_since
            _log.warning("memckpt: protected again from step %d on; %d steps were not", point.step, gap)
            self._unprotected_since = None
        _log.debug("memckpt: generation %d began in %.3f s", writer.generation, time.perf_counter() - started)
        self._begin_record(record + 1)

    def _regions_for_generation(self) -> PreparedRegions:
        spec = self._live.spec(self._request)
        regions, self._fresh = self._fresh, None
        if regions is not None and regions.message.spec != spec:
            regions.close()
            regions = None
        return regions or self._link.prepare(spec, self._timeline)

    # The agent's news, and its loss

    def _listen(self) -> None:
        self._changes.look_at_commit()
        for notice in self._link.notices():
            if isinstance(notice, Begin):
                self._generation_after = notice.record
            elif isinstance(notice, Alarm):
                _log.error("memckpt: %s", notice.reason)
                self._recorder.fail(notice.reason)
                if self._request.mode == "eager":
                    self.mode, self.mode_reason = "lazy", f"the agent's redo failed: {notice.reason}"
                    self._request = self._request_for("lazy")
            elif isinstance(notice, Drift):
                self._note_drift(notice)
            elif isinstance(notice, Gap):
                _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
            elif isinstance(notice, Saved):
                self.stored_step = notice.step
            elif isinstance(notice, SaveFailed):
                _log.warning("memckpt: step %d did not get to storage: %s", notice.step, notice.reason)
            elif isinstance(notice, Protected):
                _log.debug("memckpt: generation %d is complete", notice.generation)

    def _note_drift(self, drift: Drift) -> None:
        before, self.drift_ulp = self.drift_ulp, max(self.drift_ulp, drift.max_ulp)
        exact = self._device.type == "cpu"
        jump = not exact and before > 0 and drift.max_ulp > 1024 * before
        if exact or jump:
            _log.warning(
                "memckpt: the audit found %s off by %g ulp at record %d: it was changed outside the optimizer, or the "
                "optimizer cannot be redone exactly; the replica is written anew",
                drift.tensor,
                drift.max_ulp,
                drift.record,
            )
            self._recorder.fail(f"drift in {drift.tensor}")

    def _lose_agent(self, record: int, reason: str) -> None:
        if self._unprotected_since is None:
            self._unprotected_since = record
            _log.warning("memckpt: training goes on without protection since step %d: %s", record, reason)
        self._abandon()
        self._retry_at = record

    def _try_again(self, point: RestorePoint) -> None:
        """Start a new agent and, when this rank is alone, a new generation at once."""
        if point.record < self._retry_at:
            return
        try:
            self._link.connect(self._live.spec(self._request), self._recorder.record, rejoining=True)
            self._link.configure(self._timeline, torch.get_num_threads())
            self._generation_after = point.record if self._ranks.world_size == 1 else None
            self._listen()
            self._commit_or_begin(point)
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
            self._retry_at = point.record + _RETRY_RECORDS
            _log.warning("memckpt: no agent (%s); trying again in %d steps", error, _RETRY_RECORDS)

    # What is shown

    def metrics(self) -> dict[str, float]:
        """Milliseconds stalled since the last call, records not yet applied, drift in ulps, the newest record."""
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        lag = 0.0
        if self._link.up and self._request.mode == "eager":
            lag = float(max(0, self._recorder.record - 1 - self._link.client.applied))
        return {
            "stall_ms": stalled * 1e3,
            "lag_steps": lag,
            "drift_ulp": self.drift_ulp,
            "step": float(self._recorder.record - 1),
        }

    @property
    def stall(self) -> StallClock:
        """Seconds spent in the training thread since the session began, by cause."""
        return self._clock

    @property
    def agent_pid(self) -> int | None:
        """Process id of this node's agent, None while there is none."""
        return self._link.agent_pid

    def describe(self) -> str:
        """One line: what protects this run, how, and at what price in memory."""
        layout = Layout(self._live.spec(self._request))
        return (
            f"memckpt: protecting every step of {layout.numel / 1e6:.1f}M parameters: {self.mode} redo "
            f"({self.mode_reason}), tap: {self._tap.name}, T={self._request.period}, D={self._request.slots}, "
            f"{layout.total_bytes / 2**20:.0f} MiB on node {self._ranks.node}, agent pid {self.agent_pid}"
            + "".join(f"; note: {caveat}" for caveat in self.caveats)
        )

    # End

    def close(self, finished: bool = True) -> None:
        """Leave. Without `finished` the agent holds on to what it has.

        With it, training has ended as it should: the agent brings the final step to storage, if storage is configured,
        and goes, too. This waits for that, up to the storage timeout.
        """
        if self._closed:
            return
        self._closed = True
        self._link.finish_sending()
        self._tap.remove()
        self._step_hooks.remove()
        gradient_ops.unlisten(self)
        self._preemption.remove()
        self._close_regions()
        self._link.close(finished)

    def _close_regions(self) -> None:
        self._staging.drop()
        for regions in (self._fresh, self._resumable):
            if regions is not None:
                regions.close()
        self._fresh = self._resumable = None

    def _abandon(self) -> None:
        self._close_regions()
        self._link.abandon()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)


def _raise_oom_score() -> None:
    """Of trainer and agent, let the kernel shoot the trainer first: the state outlives it."""
    path = Path("/proc/self/oom_score_adj")
    try:
        score = int(path.read_text())
        path.write_text(str(min(1000, max(score, 0) + 50)))
    except OSError as error:
        _log.debug("memckpt: oom_score_adj stays as it is: %s", error)


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    run_dir: str | os.PathLike[str],
    resume: ResumeChoice | int = "auto",
    config: MemckptConfig | None = None,
    data_parallel: DistributedDataParallel | None = None,
    extra_modules: Mapping[str, nn.Module] | None = None,
) -> Session:
    """Protect a training from here on.

    Connects to this node's agent (starts it if there is none), agrees with the other ranks on what to resume, and
    installs the taps. Call it when model and optimizers exist and, with several ranks, after the process group does.

    Args:
        model: the model; a DistributedDataParallel wrapper is taken apart.
        optimizers: one, or several.
        run_dir: names the run; attempts with the same directory continue each other.
        resume: ``"auto"`` resumes if something is held, ``"require"`` raises if nothing is, ``"never"`` drops what is
            held, a number resumes exactly that step.
        config: settings; None takes the defaults.
        data_parallel: the DDP wrapper, where `model` is not it.
        extra_modules: modules outside the model whose tensors belong to the state (averaged models).

    Raises:
        NothingHeldError, ForeignStateError, RunBusyError, MemoryBudgetError, UnsupportedError, AgentError
    """
    if isinstance(model, DistributedDataParallel):
        data_parallel = model
        model = model.module
    return Session(
        model,
        [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers),
        run_dir=Path(run_dir),
        resume=check_resume(resume),
        config=config or MemckptConfig(),
        data_parallel=data_parallel,
        extra_modules=extra_modules or {},
    )
