"""A session: one training process's protection, from attach to close."""

from __future__ import annotations

import logging
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
from memckpt.agent.messages import Alarm, Begin, Drift, Gap, Logged, Protected, Saved, SaveFailed, Void
from memckpt.capture import flat_parameters, gradient_ops
from memckpt.capture.copier import copier_for
from memckpt.capture.live_state import LiveState, SpecRequest
from memckpt.capture.recorder import Recorder, StallClock
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps import CommHookTap, ParameterTap, PendingTap, StepHooks
from memckpt.config import MemckptConfig, RedoMode, ResumeChoice
from memckpt.errors import AgentGoneError, ForeignStateError, MemckptError, UnsupportedError, UsageError
from memckpt.recovery.restore import replica_digest
from memckpt.session.changes import Changes
from memckpt.session.choice import choose_tap
from memckpt.session.due import DueGeneration
from memckpt.session.link import AgentLink
from memckpt.session.mode import ModeChoice
from memckpt.session.peers import Peers
from memckpt.session.preemption import PreemptionNotice
from memckpt.session.rank_state import RankState, Stateful
from memckpt.session.ranks import Ranks
from memckpt.session.report import HeldState, RestoreReport, describe_protection
from memckpt.session.resume import Resumption
from memckpt.session.sharing import find_replicas, refuse_uneven, refuse_unordered
from memckpt.session.staging import RestorePoint, Staging

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
        replicated: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._data_parallel = data_parallel
        self._ranks = Ranks()
        refuse_unordered(model, optimizers, data_parallel)
        self._live = LiveState(model, optimizers, extra_modules)
        find_replicas(self._live, self._ranks, data_parallel, replicated)
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
        self._peers = Peers(config.peers, self._ranks, self._link, config.agent)
        self._resumption = Resumption(
            self._live, self._ranks, self._link, self._staging, config.storage, run_dir, self._peers
        )
        self._due = DueGeneration(self._ranks, lambda: self._request)
        self._unprotected_since: int | None = None
        self._retry_at = 0
        self._closed = False
        self._last: RestorePoint | None = None
        self._reductions_at_commit = 0
        self._stalled_before = 0.0
        self.drift_ulp = 0.0
        #: The newest step that this attempt's agent has brought to storage; None before the first.
        self.stored_step: int | None = None
        #: What cannot be made exact or be checked, in words, one line each.
        self.caveats: list[str] = []

        self._mode = ModeChoice(config, self._live, self._ranks, self._device)
        if self.mode == "eager" and self._device.type != "cpu":
            self.caveats.append(
                "the replica is redone on the CPU and may be off by units in the last place; redo='lazy' is exact"
            )
        self._live.growth.changing |= self._ranks_own_buffers()
        self._request = self._make_request()
        self._step_hooks = StepHooks(optimizers, self._recorder)
        self._tap, self.tap_reason, caveats = choose_tap(
            config, self._live, self._recorder, self._copier, data_parallel, self._link.finish_sending
        )
        self.caveats += caveats
        self._preemption = PreemptionNotice(self._link.tell_preempted)
        try:
            self._start(resume)
            self._step_hooks.install()
            self._mode.begin()
            self._tap.install()
            self._peers.mark_phases(self._recorder)
            gradient_ops.listen(self)
            self._preemption.install()
        except BaseException:  # whatever it is, an interrupt too: nobody else could close what is open
            self._unhook()
            self._abandon()
            raise

    # Start

    @property
    def mode(self) -> RedoMode:
        """How records are protected now."""
        return self._mode.mode

    @property
    def mode_reason(self) -> str:
        """Why in that mode."""
        return self._mode.reason

    def _ranks_own_buffers(self) -> set[str]:
        """Large buffers in which ranks differ. Of what is static a node holds one copy only, so these are not."""
        if self._ranks.world_size == 1:
            return set()
        own = {name: replica_digest([tensor], []) for name, tensor in self._live.large_buffers().items()}
        everybody = self._ranks.gather(own)
        return {name for name, digest in own.items() if any(each.get(name) != digest for each in everybody)}

    def _make_request(self) -> SpecRequest:
        self._staging.not_redoable = self._mode.not_redoable
        return SpecRequest(
            mode=self.mode,
            period=self._config.anchor_period(self.mode),
            every=self._mode.every,
            slots=self._config.slots,
            local_ranks=self._ranks.unit,
            world_size=self._ranks.world_size,
            replicas=self._ranks.replicas if len(self._ranks.groups) > 1 else (),
        )

    def _start(self, resume: ResumeChoice | int) -> None:
        try:
            start = self._resumption.choose(resume, self._live.spec(self._request), self.mode_reason)
        except ForeignStateError as error:
            if not flat_parameters.is_flattened(self._live.model):
                raise
            raise ForeignStateError(f"{error}. {flat_parameters.REMEDY}") from error
        self._mode.resume(self._resumption.held_mode, self._resumption.not_redoable)
        self._request = self._make_request()
        self._timeline = start.timeline
        self._recorder.begin(None, start.record)
        self._due.after = start.record if start.anew else None

    # What belongs to the rank state

    def provide(self, name: str, capture: Callable[[], Any]) -> None:
        """Have `capture()` called at each commit; what it returns is in ``held.rank_state[name]`` after a resume."""
        self._rank_state.provide(name, capture)

    def register(self, name: str, obj: Stateful) -> None:
        """Make an object with ``state_dict`` and ``load_state_dict`` part of what is committed and restored."""
        self._rank_state.register(name, obj)

    # Restore

    @property
    def held(self) -> HeldState | None:
        """What the plan decided to restore; None where training starts over."""
        return self._resumption.held

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
        return self._resumption.restore_tensors(self._tap, self._go_on)

    def _go_on(self, writer: SlotWriter, record: int) -> None:
        """The state after `record` is back: collect the next one."""
        if self._live.spec(self._request) == writer.spec and not self._peers.active:
            self._begin_record(record + 1)
        else:
            # Other settings than the last attempt's, or a state that has grown, or peers that need all of it: start a
            # new generation.
            self._recorder.begin(None, record + 1)
            same = (writer.spec.mode, writer.spec.every) == (self._request.mode, self._request.every)
            self._due.after = self._due.turn(record + 1) if same else record + 1

    def restore_rng(self) -> None:
        """Put the RNG states of torch, numpy and python back; the last thing before training goes on."""
        self._resumption.restore_rng()

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
        if self._resumption.due:
            raise UsageError("commit() before restore(): something is held; call session.restore() before training")
        started = time.perf_counter()
        inner = self._clock.total - self._clock.commit
        try:
            refuse_uneven(self._data_parallel)
            if not self._is_restore_point(gradients_pending):
                return False
            # First of all: what user code raises in it leaves everything as it was.
            rank_state = self._rank_state.encode(self._tap.layout if isinstance(self._tap, CommHookTap) else None)
            self._recorder.gradients_pending = False
            self._reductions_at_commit = self._tap.reductions
            record = self._recorder.record
            self._end_self_test(record)
            self._last = RestorePoint(record, record if step is None else step, rank_state)
            self._commit(self._last)
            if self._recorder.marks is not None:
                self._recorder.marks.step_ended(record)
            return True
        finally:
            inner = self._clock.total - self._clock.commit - inner
            self._clock.commit += time.perf_counter() - started - inner

    def _end_self_test(self, record: int) -> None:
        """Where it is over, on all ranks at the same record, that record begins a generation in the mode it allows."""
        if self._mode.after_record():
            self._request = self._make_request()
            self._due.after = record

    def _is_restore_point(self, gradients_pending: bool | None) -> bool:
        pending = self._recorder.gradients_pending if gradients_pending is None else gradients_pending
        # A batch without a reduction of all ranks belongs to the next record: nothing orders the ranks in it.
        unordered = self._ranks.world_size > 1 and self._tap.reductions == self._reductions_at_commit
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
        if self._due.after is None or record < self._due.after:
            self._staging.stage_by_value(record)
        problem = self._find_problem()
        if self._due.after is None and problem is not None:
            self._order_generation(record, problem)
        if self._due.after is not None and record >= self._due.after:
            self._begin_generation(point)
        elif self._staging.ready and (problem is None or self._staging.owes(record)):
            self._send_commit(point)
            self._obey_order(point)
            self._tell_left_out()
            self._begin_record(record + 1)
        else:
            self._link.send(Void(record, problem or self._recorder.problem or "no generation to write to"))

    def _obey_order(self, point: RestorePoint) -> None:
        """Copy the state for a checkpoint, where the agent has asked for it."""
        order = self._link.take_order(point.record)
        if order is not None:
            self._link.finish_sending()
            self._link.send(self._staging.take_snapshot(order, point))

    def _tell_left_out(self) -> None:
        """Say once what of the optimizers no record can hold."""
        for text in [text for text in self._live.left_out if text not in self.caveats]:
            _log.warning("memckpt: %s; after a resume it is as the new process makes it", text)
            self.caveats.append(text)

    def _send_commit(self, point: RestorePoint) -> None:
        finish = self._staging.seal(point)
        if not self._copier.asynchronous:
            self._link.send(finish())
            return
        self._link.send_later(finish)
        if isinstance(self._tap, PendingTap) and self._ranks.world_size > 1:
            # It stands nowhere where it could hold a reduction back until the commit has been sent.
            self._link.finish_sending()

    def _begin_record(self, record: int) -> None:
        """Go on to the next record, as soon as its slot is free."""
        writer = self._staging.writer
        assert writer is not None
        self._clock.slot_wait += self._link.wait_for_room(record, writer.spec, self._due.began)
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
        if self._staging.outgrown(self._recorder.record, self._request):
            return "parameters or groups have changed"
        return self._changes.problem

    def _order_generation(self, record: int, reason: str) -> None:
        """A new generation is due: now if nobody shares its slots, else after a record that all those reach."""
        _log.info("memckpt: a new generation begins: %s", reason)
        turn = self._due.turn(record)
        if len(self._ranks.unit) == 1:
            self._due.after = turn
            return
        changing = frozenset(self._live.growth.changing)
        self._note_order(self._link.client.ask_for_generation(max(turn, record + 1), reason, changing))

    def _note_order(self, order: Begin) -> None:
        self._live.growth.changing |= order.changing
        self._due.note(order)

    def _change_tap(self, reason: str) -> None:
        self._recorder.tap_mismatch = None
        self._recorder.streams = False
        self.tap_reason = reason
        _log.warning("memckpt: gradients are now taken after the optimizer's step: %s", reason)
        if isinstance(self._tap, ParameterTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            reductions, self._tap = self._tap.reductions, PendingTap(params, self._recorder)
            self._tap.reductions = reductions  # it goes on counting: what was seen at the last commit is remembered
            self._tap.install()

    # Generations

    def _begin_generation(self, point: RestorePoint) -> None:
        """Write the whole state by value; the log goes on from here."""
        record = point.record
        self._link.finish_sending()
        started = time.perf_counter()
        writer, commit = self._staging.write_generation(self._regions_for_generation(record), point)
        try:
            self._link.client.applied = record
            self._link.send(commit)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt(writer)
        self._tell_left_out()
        self._due.has_begun(record)
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

    def _regions_for_generation(self, record: int) -> PreparedRegions:
        spec = self._live.spec(self._request)
        regions = self._resumption.take_regions()
        if regions is not None and regions.message.spec != spec:
            regions.close()
            regions = None
        return regions or self._link.prepare(spec, self._timeline, record, reason=self.mode_reason)

    # The agent's news, and its loss

    def _listen(self) -> None:
        self._changes.look_at_commit()
        for notice in self._link.notices():
            if isinstance(notice, Begin):
                self._note_order(notice)
            elif isinstance(notice, Alarm):
                _log.error("memckpt: %s", notice.reason)
                self._recorder.fail(notice.reason)
                if self._request.mode == "eager":
                    self._mode.fall_back(f"the agent's redo failed: {notice.reason}")
                    self._request = self._make_request()
            elif isinstance(notice, Drift):
                self._note_drift(notice)
            elif isinstance(notice, Gap):
                _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
            elif isinstance(notice, (Saved, Logged)):
                self.stored_step = max(notice.step, self.stored_step or 0)
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
        """Start a new agent and, when nobody shares this rank's slots, a new generation at once."""
        if point.record < self._retry_at:
            return
        try:
            self._link.connect(self._live.spec(self._request), self._recorder.record, rejoining=True)
            self._link.configure(self._timeline, torch.get_num_threads())
            self._peers.rejoin()
            self._peers.mark_phases(self._recorder)
            self._due.after = self._due.turn(point.record) if len(self._ranks.unit) == 1 else None
            self._listen()
            self._commit_or_begin(point)
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
            # Where training waits for peers, the others soon wait for this node, and no later record ever comes.
            later = 1 if self._link.waits else _RETRY_RECORDS
            self._retry_at = point.record + later
            _log.warning("memckpt: no agent (%s); trying again in %d steps", error, later)

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
        tap, where = self._tap.name, f"on node {self._ranks.node}, agent pid {self.agent_pid}{self._peers.describe()}"
        return describe_protection(self._live.spec(self._request), self.mode_reason, tap, where, self.caveats)

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
        if finished and self._config.storage is not None and self._last is not None and self._link.up:
            self._capture_last(self._last)
        self._unhook()
        self._close_regions()
        self._link.close(finished)
        if finished:
            self._resumption.forget_resharding()

    def _capture_last(self, point: RestorePoint) -> None:
        """The final step goes to storage, so it has to be held, whatever is due."""
        if not self._staging.owes(point.record) or point.record == self._due.began:
            return
        if self._staging.moved:
            _log.warning("memckpt: parameters were changed since step %d, which storage will not have", point.step)
            return
        try:
            self._begin_generation(point)
        except MemckptError as error:
            _log.warning("memckpt: the final step %d cannot be captured: %s", point.step, error)

    def _unhook(self) -> None:
        """Take out of the user's objects what was put there, whether or not all of it was."""
        self._tap.remove()
        self._peers.stop_marking(self._recorder)
        self._step_hooks.remove()
        self._mode.end()
        gradient_ops.unlisten(self)
        self._preemption.remove()

    def _close_regions(self) -> None:
        self._staging.drop()
        self._resumption.close()

    def _abandon(self) -> None:
        self._close_regions()
        self._link.abandon()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)
