"""A session: one training process's protection, from attach to close."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.capture import flat_parameters, gradient_ops
from memckpt.capture.attributes import AttributesOf
from memckpt.capture.copier import copier_for, device_of
from memckpt.capture.live_state import LiveState, SpecRequest
from memckpt.capture.recorder import Recorder, StallClock
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps import CommHookTap, ParameterTap, PendingTap, StepHooks
from memckpt.config import MemckptConfig, MirrorConfig, RedoMode, ResumeChoice
from memckpt.errors import (
    AgentGoneError,
    ForeignStateError,
    MemckptError,
    MemoryBudgetError,
    ResumeMismatchError,
    UnsupportedError,
    UsageError,
)
from memckpt.processes.address import AgentAddress
from memckpt.protocol.trainer import Alarm, Begin, Checked, Drift, Gap, Logged, Protected, Saved, SaveFailed, Void
from memckpt.recovery.restore import replica_digest
from memckpt.session.agent_client import PreparedRegions
from memckpt.session.changes import Changes
from memckpt.session.drift import DriftReports
from memckpt.session.generation_switch import DueGeneration
from memckpt.session.link import AgentLink
from memckpt.session.mode import ModeChoice
from memckpt.session.peers import Peers
from memckpt.session.policy import choose_tap
from memckpt.session.preemption import PreemptionNotice
from memckpt.session.rank_state import Parts, RankState
from memckpt.session.ranks import Ranks
from memckpt.session.reconnection import Reconnection
from memckpt.session.repetition import Repetition, any_accelerator, compare_following
from memckpt.session.report import HeldState, RestoreReport, describe_protection
from memckpt.session.resume import Resumption
from memckpt.session.resume_check import VERDICT_VALUES, ResumeCheck, judge, judge_witness
from memckpt.session.sharing import find_replicas, refuse_uneven, refuse_unordered
from memckpt.session.staging import RestorePoint, Staging
from memckpt.session.start_line import tell_start
from memckpt.user_messages import show_by_default

_log = logging.getLogger("memckpt")
#: How resumes have proved themselves: a line that is shown unless the application configures logging otherwise.
_check_log = logging.getLogger("memckpt.check")
#: So many records in a row in which something of ours has raised are worth a pause.
_MOST_BROKEN = 3


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
        self._device = device_of(self._live.tensors())
        self._clock = StallClock()
        self._copier = copier_for(self._device)
        self._recorder = Recorder(self._live, self._copier, self._clock)
        self._changes = Changes(self._recorder)
        self._staging = Staging(self._live, self._recorder, self._copier, self._clock, self._changes, self._ranks.rank)
        address = AgentAddress.of(run_dir)
        self._link = AgentLink(address, self._ranks, config)
        # Where training waits for peers, the others wait for this node until it is overdue.
        self._reconnection = Reconnection(address, pauses=not self._link.waits)
        self._rank_state = RankState(self._live, self._copier, self._device)
        self._peers = Peers(config.peers, self._ranks, self._link, config.agent)
        self._resumption = Resumption(
            self._live,
            self._ranks,
            self._link,
            self._staging,
            config.storage,
            run_dir,
            self._peers,
            config.resume_check,
        )
        self._due = DueGeneration(self._ranks, lambda: self._request)
        self._unprotected_since: int | None = None
        self._closed = False
        self._told: set[str] = set()
        self._broken_records = 0
        self._last: RestorePoint | None = None
        self._reductions_at_commit = 0
        self._stalled_before = 0.0
        self._drift = DriftReports(exact=self._device.type == "cpu")
        #: The newest step that this attempt's agent has brought to storage; None before the first.
        self.stored_step: int | None = None
        #: What cannot be made exact or be checked, in words, one line each.
        self.caveats: list[str] = []

        self._mode = ModeChoice(config, self._live, self._ranks, self._device)
        if self.mode == "eager" and self._device.type != "cpu":
            self.caveats.append(
                "the replica is redone on the CPU and may be off by units in the last place; redo='lazy' is exact"
            )
        if self._live.redone_only_here and self._mode.redoes and config.storage is not None:
            self._tell_redone_only_here()
        self._live.growth.apart = self._ranks_own_buffers()
        self._live.growth.changing |= self._live.growth.apart
        self._request = self._make_request()
        self._step_hooks = StepHooks(optimizers, self._recorder)
        self._tap, self.tap_reason, caveats = choose_tap(
            config, self._live, self._recorder, self._copier, data_parallel, self._link.finish_sending
        )
        self.caveats += caveats
        self._recorder.tap = self._tap.name
        self._preemption = PreemptionNotice(self._link.tell_preempted)
        try:
            self._start(resume)
            self._step_hooks.install()
            self._mode.begin()
            self._tap.install()
            self._peers.mark_phases(self._recorder)
            gradient_ops.listen(self)
            self._preemption.install()
        except BaseException as error:  # whatever it is, an interrupt too: nobody else could close what is open
            self._unhook()
            # Whoever is refused does not come back soon: an agent that was started for that has nothing to wait for.
            self._abandon(dismiss=isinstance(error, MemckptError))
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

    def _tell_redone_only_here(self) -> None:
        text = (
            f"{', '.join(self._live.redone_only_here)}: no other process can import this optimizer class, so what an "
            "attempt that was killed leaves in memory gets to storage only once the run is started again; checkpoints "
            "while training runs, and at its end, are made as ever. In a module of its own the class can be imported"
        )
        self.caveats.append(text)
        if self._ranks.rank == 0:
            _log.warning("memckpt: %s", text)

    def _make_request(self) -> SpecRequest:
        self._staging.not_redoable = self._mode.not_redoable
        self._recorder.needs_steps = self._mode.redoes
        # A replica of this node, or those of a lazy node on others.
        replicas = self.mode == "eager" or (self.mode == "lazy" and isinstance(self._config.peers, MirrorConfig))
        trails = self._config.replays and replicas
        # The replica is one record further behind, and with several ranks one of them may be filling the next slot.
        # Ranks may differ by one commit, and a commit from an accelerator is sent one record later.
        more = (self._ranks.world_size > 1 or self._config.slots < 3) + self._copier.asynchronous if trails else 0
        return SpecRequest(
            mode=self.mode,
            period=self._config.anchor_period(self.mode),
            every=self._mode.every,
            slots=self._config.slots + (more if self.mode == "eager" else 0),
            trails=trails,
            local_ranks=self._ranks.unit,
            world_size=self._ranks.world_size,
            replicas=self._ranks.replicas if len(self._ranks.groups) > 1 else (),
            reads_late=self._config.reads_late,
            shares=self._ranks.shares,
            asynchronous=self._copier.asynchronous,
        )

    def _start(self, resume: ResumeChoice | int) -> None:
        try:
            start = self._resumption.choose(resume, self._live.spec(self._request), self.mode_reason)
        except ForeignStateError as error:
            if not flat_parameters.is_flattened(self._live.model):
                raise
            raise ForeignStateError(f"{error}. {flat_parameters.REMEDY}") from error
        if self._ranks.rank == 0:
            tell_start(
                self._resumption.held,
                self._resumption.start_reason,
                self._resumption.drops_held,
                self._resumption.repeated,
            )
        self._mode.resume(self._resumption.held_mode, self._resumption.not_redoable)
        self._request = self._make_request()
        self._timeline = start.timeline
        self._recorder.begin(None, start.record)
        self._due.after = start.record if start.anew else None

    # What belongs to the rank state

    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Parts | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None:
        """Have `capture()` called at each commit; what it returns is in ``held.rank_state[name]`` after a resume.

        Args:
            parts: names the parts of what it returns for the resume check, and leaves out what depends on the clock.
            put_back: called behind a repeated step that differs, with what was captured when it was first taken.
        """
        self._rank_state.provide(name, capture, parts, put_back)

    def unrepeatable(self, reason: str) -> None:
        """Say that to repeat the current step would repeat more than a step: an epoch's end, a file that was written.

        A resume at this step is then not proved by repeating it; its check says *none*, and `reason`.
        """
        self._rank_state.unrepeatable = self._rank_state.unrepeatable or reason

    def register(self, name: str, obj: object, attributes: Sequence[str] = (), parts: Parts | None = None) -> None:
        """Make an object with ``state_dict`` and ``load_state_dict`` part of what is committed and restored.

        Args:
            name: by which it is restored.
            obj: such an object, or any with `attributes`.
            attributes: names of plain attributes of the object that are carried in place of its state.
            parts: as of :meth:`provide`.

        Raises:
            UsageError: the name is taken, or the object has no such methods.
            ConfigurationError, UnsupportedStateError: an attribute is not there, or cannot be stored.
        """
        self._rank_state.register(name, AttributesOf(name, obj, attributes) if attributes else obj, parts)

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        """Have `accumulates()` asked in each backward whether a later one adds to its gradients before a step is taken.

        Then they are not copied, which is all that it changes: a wrong answer is made good when the step is taken.
        """
        self._recorder.accumulates = accumulates

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
        report = self._resumption.restore_tensors(self._tap, self._go_on)
        if report is not None:
            self._resumption.restore_gradients(self._recorder.pending)
            self._tap_again()  # parameters may have been unfrozen when the dead attempt ended
        repetition = self._resumption.repetition
        if repetition is not None:
            self._recorder.begin(None, repetition.record)
            self._recorder.repeated = repetition.steps.stepped if repetition.steps is not None else None
        elif report is not None and self.check.verdict == "none":
            self._tell_verdict()
        witness = self._resumption.witness
        if witness is not None and witness.waits:
            self._recorder.witness = witness.gradient
        return report

    def _go_on(self, writer: SlotWriter, record: int) -> None:
        """The state after `record` is back: collect the next one."""
        if self._live.spec(self._request) == writer.spec and not self._peers.active:
            try:
                self._begin_record(record + 1)
            except MemoryBudgetError as error:
                # The dead attempt had written a generation's start, and there is no room for its records.
                self._lose_agent(record, str(error))
                self._recorder.begin(None, record + 1)
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
        with self._clock.in_hook():
            self._recorder.gradients_change(kind, operand, params)

    def gradients_changed(self, params: list[torch.Tensor]) -> None:
        """From :mod:`memckpt.capture.gradient_ops`: the change is made."""
        with self._clock.in_hook():
            self._recorder.note_versions(params)

    # Commit

    def commit(self, step: int | None = None, gradients_pending: bool | None = None) -> bool:
        """End a record here, if this is a restore point: after the optimizer's step, with no gradient pending.

        Args:
            step: the framework's step number; None takes the record's number.
            gradients_pending: whether a backward has run whose gradients no step has used yet; None lets the taps
                decide. Where a scaler skipped the step, or where what was not used is thrown away, pass False.

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
            self._recorder.graphs.refuse_unseen(self._ranks.world_size, gradients_pending is not None)
            if not self._is_restore_point(gradients_pending):
                return False
            # First of all: what user code raises in it leaves everything as it was.
            layout = self._tap.layout if isinstance(self._tap, CommHookTap) else None
            rank_state = self._rank_state.capture(layout, self._recorder.pending.capture())
            self._recorder.backward_ran = False
            self._reductions_at_commit = self._tap.reductions
            record = self._recorder.record
            self._end_self_test(record)
            self._last = RestorePoint(record, record if step is None else step, rank_state)
            self._rank_state.unrepeatable = ""
            repetition = self._resumption.repetition
            if repetition is not None:
                self._end_repetition(repetition, self._last)
            else:
                self._compare_following(self._last)
                self._hear_witness(self._last)
                self._commit(self._last)
            if self._recorder.marks is not None:
                self._recorder.marks.step_ended(record)
            return True
        finally:
            inner = self._clock.total - self._clock.commit - inner
            self._clock.commit += time.perf_counter() - started - inner

    def _end_repetition(self, repetition: Repetition, point: RestorePoint) -> None:
        """The step of the resumed record has been repeated: compare, and go on from what is held of it."""
        self._resumption.repetition = self._recorder.repeated = None
        self._link.finish_sending()
        everybody = None
        try:
            self._copier.wait_before_changes()
            everybody = repetition.finish(point.rank_state, self._rank_state)
        finally:
            if everybody is None:
                repetition.close()
        what = f"step {repetition.step} was repeated"
        gone = "the agent has gone" if everybody is None else ""
        if everybody is None:
            self.check.settle("none", f"{what}, but its agent has gone, and what it held with it")
        else:
            judge(self.check, everybody, any_accelerator(self._live, self._ranks), what)
            writer = repetition.held.take_writer()
            if writer is not None:
                self._resumption.adopt(writer)
                try:
                    self._go_on(writer, point.record)
                except AgentGoneError as error:
                    gone = str(error)
        self._tell_verdict()
        if gone:
            self._lose_agent(point.record, gone)
            self._try_again(point)
        if self._recorder.record == point.record:
            self._recorder.begin(None, point.record + 1)

    def _compare_following(self, point: RestorePoint) -> None:
        """A captured state was resumed: of the step behind it the rank state is known, and nothing else."""
        held = self._resumption.following.pop(point.record, None)
        if held is None:
            return
        everybody = compare_following(point.rank_state, held, self._rank_state, self._ranks)
        judge(self.check, everybody, False, f"step {point.step} was taken again, and its rank state was compared")
        self._tell_verdict()

    def _hear_witness(self, point: RestorePoint) -> None:
        """The first record behind the resumed one ends: were its gradients those that the dead attempt had left?"""
        witness, self._resumption.witness, self._recorder.witness = self._resumption.witness, None, None
        if witness is None:
            return
        everybody = self._ranks.gather(witness.testify())
        # Where the last step was to be repeated and could not be, that has been said.
        if self.check.verdict == "pending" or any(one.gradients for one in everybody):
            judge_witness(self.check, everybody, any_accelerator(self._live, self._ranks), point.step)
            self._tell_verdict()

    @property
    def check(self) -> ResumeCheck:
        """How this attempt's resume has proved itself."""
        return self._resumption.check

    def _tell_verdict(self) -> None:
        """Say what the resume check has found; with ``"require"`` training ends where something differs.

        Raises:
            ResumeMismatchError: on every rank.
        """
        check = self.check
        if self._ranks.rank == 0:
            level = logging.WARNING if check.verdict == "different" else logging.INFO
            show_by_default(_check_log)
            _check_log.log(level, "memckpt: resume check: %s", check.line)
            if self._link.up:
                with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
                    self._link.send(Checked(check.verdict, check.line))
        if check.verdict != "different" or self._config.resume_check != "require":
            return
        if self._config.accept_changes:
            _log.warning("memckpt: training goes on all the same, as accept_changes says")
            return
        raise ResumeMismatchError(
            f"resume_check='require': expected training to repeat what is held, found: {check.line}. What was "
            "held is still held: mend the script and start again, or start once with accept_changes=True"
        )

    def _end_self_test(self, record: int) -> None:
        """Where it is over, on all ranks at the same record, that record begins a generation in the mode it allows."""
        if self._mode.after_record(self._recorder.compiled):
            self._request = self._make_request()
            self._due.after = record

    def _is_restore_point(self, gradients_pending: bool | None) -> bool:
        if self._ranks.world_size > 1 and self._tap.reductions == self._reductions_at_commit:
            # A batch without a reduction of all ranks belongs to the next record: nothing orders the ranks in it.
            return False
        if gradients_pending is None:
            return self._recorder.pending.at_restore_point()
        if not gradients_pending:
            self._recorder.pending.waive()
        return not gradients_pending

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
        except Exception as error:  # whatever it is, the user's training goes on
            self._stumble(point.record, error)
        if self._recorder.record == point.record:
            self._recorder.begin(None, point.record + 1)

    def _stumble(self, record: int, error: Exception) -> None:
        """Something of ours, or of torch, has raised that nobody has thought of: no protection for a while."""
        reason = f"protecting a step failed ({type(error).__name__}: {error})"
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("memckpt: %s; please report it", reason, exc_info=error)
        self._lose_agent(record, reason)
        self._reconnection.stumbled()

    def _commit_or_begin(self, point: RestorePoint) -> None:
        record = point.record
        if self._staging.ranks_disagree(record):
            self._due.after = record
        self._broken_records = self._broken_records + 1 if self._recorder.broken else 0
        if self._broken_records == _MOST_BROKEN:
            self._broken_records = 0
            self._reconnection.stumbled()
            raise MemckptError(self._recorder.broken)
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
        if not writer.whole:
            if not self._link.client.make_slots(writer.generation):
                self._staging.drop()
                self._recorder.begin(None, record)
                return
            writer.use_all_slots()
        self._clock.slot_wait += self._link.wait_for_room(record, writer.spec, self._due.began)
        self._staging.begin_record(record)

    def _find_problem(self) -> str | None:
        """Why this record cannot be staged as it stands."""
        if self._recorder.tap_mismatch is not None:
            self._change_tap(self._recorder.tap_mismatch)
        if self._recorder.problem is not None:
            return self._recorder.problem
        changed = self._changes.static_changes()
        if changed:
            self._live.growth.changing.update(changed)
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return f"{changed[0]}{others} changed and will be staged with every record from now on"
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
        self._live.growth.apart |= order.apart
        self._due.note(order)

    def _change_tap(self, reason: str) -> None:
        self._recorder.tap_mismatch = None
        self._recorder.streams = False
        self._recorder.tap = PendingTap.name
        self.tap_reason = reason
        _log.warning("memckpt: gradients are now taken after the optimizer's step: %s", reason)
        if isinstance(self._tap, ParameterTap):
            self._tap.remove()
            params = [p for o in self._live.optimizers for g in o.param_groups for p in g["params"]]
            reductions, self._tap = self._tap.reductions, PendingTap(params, self._recorder)
            self._tap.reductions = reductions  # it goes on counting: what was seen at the last commit is remembered
            self._tap.install()

    # Generations

    def _begin_generation(self, point: RestorePoint, goes_on: bool = True) -> None:
        """Write the whole state by value; the log goes on from here, if training does."""
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
        self._recorder.pending.regroup()
        self._tap_again()  # parameters may have been unfrozen since
        if goes_on:
            self._begin_record(record + 1)
        if self._unprotected_since is not None:
            gap = record - self._unprotected_since
            _log.warning("memckpt: protected again from step %d on; %d steps were not", point.step, gap)
            self._unprotected_since = None
        _log.debug("memckpt: generation %d began in %.3f s", writer.generation, time.perf_counter() - started)

    def _tap_again(self) -> None:
        """Hooks are on the parameters that are trained now."""
        if isinstance(self._tap, (ParameterTap, PendingTap)):
            self._tap.remove()
            self._tap.install()

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
                if self._drift.wants_rewrite(notice):
                    self._recorder.fail(f"drift in {notice.tensor}")
            elif isinstance(notice, Gap):
                _log.warning("memckpt: not protected until the state is written anew: %s", notice.reason)
            elif isinstance(notice, (Saved, Logged)):
                self.stored_step = max(notice.step, self.stored_step or 0)
            elif isinstance(notice, SaveFailed):
                _log.warning("memckpt: step %d did not get to storage: %s", notice.step, notice.reason)
            elif isinstance(notice, Protected):
                _log.debug("memckpt: generation %d is complete", notice.generation)

    def _lose_agent(self, record: int, reason: str) -> None:
        if self._unprotected_since is None:
            self._unprotected_since = record
            _log.warning("memckpt: training goes on without protection since step %d: %s", record, reason)
        self._abandon()

    def _try_again(self, point: RestorePoint) -> None:
        """Start a new agent and, when nobody shares this rank's slots, a new generation at once."""
        if not self._reconnection.due():
            return
        try:
            self._link.connect(self._live.spec(self._request), self._recorder.record, rejoining=True)
            self._link.configure(self._timeline, torch.get_num_threads())
            self._peers.rejoin()
            self._peers.mark_phases(self._recorder)
            self._due.after = self._due.turn(point.record) if len(self._ranks.unit) == 1 else None
            self._listen()
            self._commit_or_begin(point)
            self._reconnection.succeeded()
        except MemckptError as error:
            self._lose_agent(point.record, str(error))
            self._reconnection.failed(error)
        except Exception as error:
            self._stumble(point.record, error)

    # What is shown

    @property
    def drift_ulp(self) -> float:
        """The largest distance that the audit has found between replica and live state."""
        return self._drift.largest_ulp

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
            "resume_check": VERDICT_VALUES[self.check.verdict],
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
        last = self._last if self._last is not None else self._resumption.point  # which no step has followed
        if finished and self._config.storage is not None and last is not None and self._link.up:
            self._capture_last(last)
        self._unhook()
        self._close_regions()
        self._link.close(finished)
        if finished:
            self._resumption.forget_resharding()

    def _capture_last(self, point: RestorePoint) -> None:
        """The final step goes to storage, so it has to be held, whatever is due: by value where only we can redo it."""
        only_here = self.mode == "lazy" and bool(self._live.redone_only_here)
        if point.record == self._due.began or not (only_here or self._staging.owes(point.record)):
            return
        if self._staging.moved if not only_here else not self._staging.stands_at(point.record):
            _log.warning("memckpt: parameters were changed since step %d, which storage will not have", point.step)
            return
        try:
            self._begin_generation(point, goes_on=False)
        except Exception as error:
            _log.warning("memckpt: the final step %d cannot be captured: %s", point.step, error)

    def _unhook(self) -> None:
        """Take out of the user's objects what was put there, whether or not all of it was."""
        self._tap.remove()
        self._peers.stop_marking(self._recorder)
        self._step_hooks.remove()
        self._mode.end()
        gradient_ops.unlisten(self)
        self._preemption.remove()
        self._reconnection.forget()

    def _close_regions(self) -> None:
        self._staging.drop()
        self._resumption.close()

    def _abandon(self, dismiss: bool = False) -> None:
        self._close_regions()
        self._link.abandon(dismiss)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)
