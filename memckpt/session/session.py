"""Session: the protection of one training process, from attach to close."""

from __future__ import annotations

import atexit
import functools
import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt.capture.beside.attributes import modules_beside, standing_at
from memckpt.capture.beside.param_groups import say_groups_that_are_back
from memckpt.capture.copier import copier_for, device_of
from memckpt.capture.live_state import LiveState
from memckpt.capture.phases import StallClock
from memckpt.capture.recorder import Recorder
from memckpt.capture.step_hooks import StepHooks
from memckpt.capture.taps.shards import FLATTENED_REMEDY, is_flattened
from memckpt.config import RedoMode, ResumeChoice
from memckpt.config.arguments import ProtectionArguments
from memckpt.config.observers import Committed, Observer, Watched
from memckpt.errors import (
    AgentGoneError,
    ForeignStateError,
    MemckptError,
    ResumeMismatchError,
    UsageError,
    without_our_frames,
)
from memckpt.journal.events import Recovered
from memckpt.processes.address import AgentAddress
from memckpt.session.compressed_averages import CompressedAverages
from memckpt.session.generation_switch import GenerationSwitch
from memckpt.session.gradient_tap import GradientTap
from memckpt.session.link import AgentLink, LoggedValues
from memckpt.session.loop import LoaderT, Loop
from memckpt.session.mode import ModeChoice
from memckpt.session.peers import Peers
from memckpt.session.protection import PreemptionNotice, Protection
from memckpt.session.rank_state import ACCEPTED, MADE, METRICS, OBJECTS, OWN, Parts, RankState
from memckpt.session.ranks import (
    Launch,
    LocalTraining,
    Ordinal,
    Ranks,
    find_own_buffers,
    find_replicas,
    find_slices,
    refuse_few_slots,
    refuse_join_context,
    refuse_other_tensors,
    refuse_unordered,
    take_own_modules,
)
from memckpt.session.resume.chosen import Chosen, ChosenInMemory
from memckpt.session.resume.first_steps import FirstSteps, ProvenEnvironments
from memckpt.session.resume.report import VERDICT_VALUES, HeldState, RestoreReport, ResumeCheck, describe_protection
from memckpt.session.resume.resume import Resumption
from memckpt.session.staging import Changes, RestorePoint, Staging
from memckpt.session.tuning import Tuning, tell_when_log_pays
from memckpt.state import codec, rng
from memckpt.user_messages import nbytes_text, seconds_text

_log = logging.getLogger("memckpt")
#: What a loggers' user looks at: the cost, how far storage is, restarts, and whether something is wrong.
_MAIN_METRICS = ("stall_ms", "stored_step", "attempt", "alarms")
_AT_STEP_BECAUSE, _DOUBT = OWN + "at_step_because", OWN + "doubt"


def _whole_number(step: int) -> int:
    """A step's number as an int of Python: one of numpy, say."""
    try:
        return operator.index(step)
    except TypeError:
        raise UsageError(f"commit(step=...): expected a whole number, found {step!r}") from None


class Session:
    """Protects one model and its optimizers. Made by :func:`memckpt.attach`; not thread-safe.

    Order of calls: attach, ``provide``/``register``/``loader``, ``restore``, then ``commit`` at each restore point,
    ``close``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        arguments: ProtectionArguments,
        *,
        data_parallel: DistributedDataParallel | None,
        extra_modules: Mapping[str, nn.Module],
        replicated: Sequence[str] = (),
        observers: Sequence[Observer] = (),
    ) -> None:
        self._closed = self._has_told = self._has_continued = False
        self._closed_because = "after close(): attach again to go on"
        self._observers = observers
        self._last: RestorePoint | None = None
        self._last_metrics: dict[str, float] | None = None  # once it is closed
        #: The step number of the last commit, restore point or not; None before the first.
        self._number: int | None = None
        self._reductions_at_commit = 0
        self._stalled_before = 0.0
        refuse_unordered(model, optimizers, data_parallel)
        self._ranks = Ranks()
        self._ordinal = Ordinal(arguments.run_dir, self._ranks)
        arguments = self._ordinal.place(arguments)
        self._run_dir = arguments.run_dir
        self._launch = Launch(Path(arguments.run_dir), self._ranks)
        proven = self._look_at_training(model, optimizers, arguments, data_parallel, extra_modules, replicated)
        self._wire_parts(Path(arguments.run_dir), optimizers, proven)
        try:
            self._start(self._launch.resolve(arguments.resume))
            doubt = self._ordinal.find_doubt()
            if doubt and self._resumption.held is not None:
                self.inexact(doubt)
            elif doubt and self._ranks.rank == 0:
                _log.warning("memckpt: %s", doubt)
            ranks = self._ranks
            place = (arguments.run_dir, ranks.node, ranks.rank, ranks.world_size, self.agent_pid)
            for each in observers:
                each.begin_session(Watched(model, self._live.optimizers, self._live.tensors, *place))
            self._ordinal.note_open()
            _sessions.add(self)
        except BaseException as error:  # an interrupt, too: the caller has no session to close
            self._unhook()
            self._close_parts()
            # A refused start is not repeated soon: an agent that was started for it has nothing to wait for.
            self._link.abandon(dismiss=isinstance(error, MemckptError))
            raise

    def _look_at_training(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        arguments: ProtectionArguments,
        data_parallel: DistributedDataParallel | None,
        extra_modules: Mapping[str, nn.Module],
        replicated: Sequence[str],
    ) -> ProvenEnvironments:
        """First phase: find what is trained, and by which ranks; collective. Nothing is hooked, and no agent asked."""
        self._data_parallel, ranks = data_parallel, self._ranks
        proven = ProvenEnvironments(arguments.config, Path(arguments.run_dir), ranks)
        self._compression = compression = CompressedAverages(proven.config, model, data_parallel)
        config = compression.with_period(proven.config)
        owners = {"model": model, **extra_modules}
        hidden = modules_beside([model, *extra_modules.values()], owners)
        beside = {**hidden, **extra_modules}
        self._own_modules = take_own_modules(beside, ranks)
        # Adapters name what they have found by its place, too.
        found = [name for name, one in beside.items() if standing_at(owners, name) is one]
        places = {name: functools.partial(standing_at, owners, name) for name in found}
        self._live = live = LiveState(model, optimizers, {**beside, **compression.modules}, places)
        find_replicas(live, ranks, data_parallel, replicated)
        find_slices(config, live, ranks)
        refuse_other_tensors(live, ranks)
        refuse_few_slots(config.records_in_flight, ranks)
        device = device_of(live.tensors())
        codec.use_device(device)
        if lacking := rng.why_not_carried():
            live.not_carried[lacking] = None
        self._clock, self._copier = StallClock(), copier_for(device)
        self._recorder = Recorder(live, self._copier, self._clock)
        self._training = LocalTraining(config, ranks, live, device, self._copier, self._recorder)
        return proven

    def _wire_parts(self, run_dir: Path, optimizers: Sequence[Optimizer], proven: ProvenEnvironments) -> None:
        """Second phase: make the parts, each of those above it. Choices of mode and tap are collective."""
        training, ranks, live, config = self._training, self._ranks, self._live, self._training.config
        on_accelerator = training.device.type != "cpu"
        self._link = link = AgentLink(AgentAddress.of(run_dir), ranks, config, on_accelerator)
        # What a record consists of.
        self._rank_state = rank_state = RankState(live, self._copier, config.override)
        for name, module in self._own_modules.items():
            rank_state.register(f"{OWN}module {name}", module)
        self._loop = Loop(rank_state, ranks, self._go_live)
        changes = Changes(self._recorder, live)
        self._staging = staging = Staging(training, changes)
        self._peers = peers = Peers(config.peers, ranks, link, config.agent)
        # What an attempt goes on from.
        self._first_steps = FirstSteps(training, link, rank_state, proven)
        self._resumption = Resumption(training, link, staging, peers, run_dir, self._first_steps)
        # How records are taken and kept.
        self._mode = ModeChoice(config, live, ranks, training.device)
        training.caveats.extend(filter(None, [*self._mode.caveats(), self._copier.caveat]))
        live.growth.apart = find_own_buffers(live, ranks)
        live.growth.changing |= live.growth.apart
        self._compression.join(self._recorder, live, rank_state)
        self._step_hooks = StepHooks(optimizers, self._recorder)
        self._tap = GradientTap(training, self._data_parallel, link.finish_sending, self._compression)
        self._switch = GenerationSwitch(training, link, staging, changes, self._mode, self._tap)
        self._protection = Protection(training, link, staging, self._switch, peers, changes, self._tap)
        self._tuning = Tuning(training, self._mode, self._protection, staging, rank_state)
        self._preemption = PreemptionNotice(link.tell_preempted)
        self._logged = LoggedValues(link.send_if_connected)

    def _start(self, resume: ResumeChoice | int) -> None:
        """Third phase: agree on the state to go on from, then hook into the training; collective."""
        self._resumes_exactly = resume == "exact"
        try:
            spec = self._live.spec(self._switch.request)
            start = self._resumption.choose(resume, spec, self.mode_reason, self._launch)
        except ForeignStateError as error:
            if not is_flattened(self._live.model):
                raise
            raise ForeignStateError(f"{error}. {FLATTENED_REMEDY}") from error
        held = self._resumption.held
        if self._ranks.rank == 0:
            tell_when_log_pays(self._training.config.storage, self._live.spec(self._switch.request))
        self._mode.resume(*self._resumption.held_mode)
        self._tuning.resume_rate(held.rank_state if held is not None else None)
        self._switch.use_mode()
        self._recorder.begin_record(None, start.record)
        self._switch.start(start.record if start.anew else None)

        self._step_hooks.install()
        self._live.strangers.install()
        self._mode.install_test()
        self._tap.install()
        # Gradients are taken after the step where an attempt before did; ranks that share slots do alike.
        self._rank_state.provide(_AT_STEP_BECAUSE, lambda: self._tap.at_step_because, parts=lambda value: {})
        because = held.rank_state.get(_AT_STEP_BECAUSE, "") if held is not None else ""
        if because := self._ranks.first_reason(because):
            self._tap.take_at_step(because)
        self._rank_state.provide(_DOUBT, lambda: self._switch.doubt, parts=lambda value: {})
        self._peers.mark_phases(self._recorder)
        self._preemption.install()

    # Rank state

    def provide(
        self,
        name: str,
        capture: Callable[[], Any],
        parts: Parts | None = None,
        put_back: Callable[[Any], Any] | None = None,
    ) -> None:
        """Call `capture()` at each commit; its value is in ``held.rank_state[name]`` after a resume.

        Args:
            name: key of the value, not provided before.
            capture: returns a value of plain types, arrays and tensors.
            parts: splits the value into named parts for the resume check, without those that depend on the clock.
            put_back: called after a repeated step that differs, with the value captured when it was first taken.

        Raises:
            UsageError: the name is taken.
        """
        self._rank_state.provide(name, capture, parts, put_back)

    def unrepeatable(self, reason: str) -> None:
        """Declare that repeating the current step would repeat more than a step: an epoch's end, a write to a file.

        A resume at this step does not repeat it; its check says *none*, and `reason`.
        """
        self._rank_state.unrepeatable = self._rank_state.unrepeatable or reason

    @without_our_frames
    def register(self, name: str, obj: object, attributes: Sequence[str] = (), parts: Parts | None = None) -> None:
        """Make an object with ``state_dict`` and ``load_state_dict`` part of what is committed and restored.

        Args:
            obj: an object with these methods, a generator of torch, numpy or random, or any object with `attributes`.
            attributes: names of attributes of the object that are carried in place of its state.
            parts: as for :meth:`provide`.

        Raises:
            UsageError: the name is taken, or the object has no such methods.
            ConfigurationError, UnsupportedStateError: an attribute does not exist, or cannot be stored.
        """
        self._rank_state.register(name, obj, attributes, parts)

    def inexact(self, reason: str) -> None:
        """Declare that resumes of this run are not exact from the next record on; `report.exact` is False then."""
        self._rank_state.inexact(reason)

    def carried(self, objects: Callable[[], Iterable[object]]) -> None:
        """Declare objects on the model's modules whose state the caller carries; the session looks for others."""
        self._rank_state.elsewhere.append(objects)

    def announce_accumulation(self, accumulates: Callable[[], bool]) -> None:
        """Call `accumulates()` in each backward: whether a later one adds to its gradients before the next step.

        If so, the gradients are not copied yet. A wrong answer costs time only: the step copies what is missing.
        """
        self._recorder.gradients.announce_accumulation(accumulates)

    # Restore

    @property
    def held(self) -> HeldState | None:
        """The state that is restored; None where training starts over. Once it is read no other state is."""
        self._has_told = True
        return self._resumption.held

    @without_our_frames
    def restore(self) -> RestoreReport | None:
        """Restore tensors, optimizer state, registered objects, and at last the RNG states.

        Call it once, right before the training loop. Returns None if there is nothing to restore.
        """
        made = [len(optimizer.param_groups) for optimizer in self._live.optimizers]
        report = self.restore_tensors()
        say_groups_that_are_back(self._live, made)
        held = self._resumption.held
        if report is not None and held is not None:
            report.because(self._rank_state.load_registered(held.rank_state))
        if report is not None or held is None:
            self.restore_rng()
        return report

    def restore_tensors(self) -> RestoreReport | None:
        """Restore parameters, buffers, optimizer state and groups, in place; the first half of :meth:`restore`."""
        if not self._resumption.due:
            return None
        self._compression.expect_carried()
        filled = self._resumption.fill(self._has_told)
        chosen = filled.chosen
        if filled.start is not None:
            self._recorder.begin_record(None, filled.start.record)
            self._switch.start(filled.start.record)
        if filled.refuted:
            self._switch.distrust_resumed(filled.refuted)
        writer = self._resumption.go_on(filled, self._tap.current)
        if writer is not None:
            self._protection.resume(writer, chosen.held.record)
        report = self._resumption.finish(filled)
        self._tuning.set_redo_seconds(self._resumption.record_redo_seconds)
        self._restore_beside(chosen, report)
        self._tap.reinstall()  # parameters may have been unfrozen when the dead attempt ended
        if self._ranks.rank == 0:
            what = report.step, report.record, report.tier, round(report.seconds, 3), report.steps_lost
            self._link.tell_journal(Recovered(*what, report.exact, report.repeated, report.reasons))
        self._accept(report)
        self._first_steps.begin_comparison(chosen)
        for each in self._observers:
            each.see_restored(report.step, report.record, report.tier, report.seconds, report.repeated)
        return report

    def _restore_beside(self, chosen: Chosen, report: RestoreReport) -> None:
        """Restore what goes with tensors, and have the report say why training does not go on exactly; collective."""
        doubt = chosen.not_exact or chosen.held.rank_state.get(_DOUBT, "")
        for one in (self._resumption.state_after_repetition, chosen):  # both are put in place
            if one is not None:
                self._rank_state.take_over(one.state)
        own = (doubt, *self._rank_state.reasons, *self._live.not_carried)
        report.because(*(reason for each in self._ranks.gather(own) for reason in each))
        self._compression.end_restore(report, chosen.held.rank_state)
        self._rank_state.add_to_report = report.because
        self._rank_state.load([OBJECTS, METRICS, MADE], chosen.held.rank_state)
        report.because(*(overridden := self._rank_state.made.overridden))
        if overridden and isinstance(chosen, ChosenInMemory) and chosen.following:
            chosen.following = {}
            self.check.repeat_nothing("it was taken with other hyperparameters")

    def _accept(self, report: RestoreReport) -> None:
        """Have later resumes name why this one is not exact, unless an exact one is asked for; collective.

        Raises:
            ResumeMismatchError: it is, and this one is not exact; on every rank.
        """
        reasons = [one for one in report.reasons if not one.startswith(ACCEPTED)]
        found = self._ranks.first_reason("; ".join(reasons))
        if self._resumes_exactly and found:
            kept = "What was held is" if report.tier in ("local memory", "peers") else "What was stored is"
            raise ResumeMismatchError(
                f"resume='exact': expected to go on exactly behind step {report.step}, found: {found}. {kept} still "
                "there: resume='auto' goes on all the same, resume=STEP from an older step, resume='never' anew"
            )
        # Later resumes go on exactly with what this one has overridden.
        self._rank_state.accept(one for one in reasons if one not in self._rank_state.made.overridden)

    def restore_rng(self) -> None:
        """Restore the RNG states of torch, numpy and python; the last call before training goes on."""
        self._loop.continue_at(self._resumption.held)
        report = self._first_steps.report
        chosen = self._resumption.chosen
        if report is not None and not self._has_continued and chosen is not None:
            lost = self._rank_state.variables_not_restored(chosen.state)
            self._accept(report.because(*self._loop.found, *lost))
        if self._resumption.chosen is None:
            self._has_continued = True
        elif self._has_continued:
            self._rank_state.put_settings_back()  # of a loop that goes on only now
            self._go_live()
        else:
            self._has_continued = True
            if self._first_steps.repetition is None:
                self._rank_state.made.override()
            self._rank_state.note_settings()
            self._resumption.restore_rng()

    def _go_live(self) -> None:
        """Restore the RNG states at the first batch of a loop, whose top may have drawn."""
        if (chosen := self._resumption.chosen) is not None:
            self._rank_state.find_differing_draws(chosen.state)
            self._resumption.restore_rng()

    # The loop over data

    @without_our_frames
    def loader(self, loader: LoaderT) -> LoaderT:
        """Have a loader continue at its place: after a resume its next iteration begins behind the last commit.

        Call it before :meth:`restore`. Samples that were trained before are not loaded again.

        Args:
            loader: a torch DataLoader, or what ``fabric.setup_dataloaders`` returned.

        Returns:
            The same object, followed in place until :meth:`close`.

        Raises:
            UsageError: called after ``restore`` or a commit, or another session follows the loader.
            UnsupportedError: it is no DataLoader.
        """
        return self._loop.follow(loader)

    def epochs(self, total: int) -> Iterator[int]:
        """Replacement of ``range(total)`` that begins with the epoch to resume; call it after :meth:`restore`.

        Raises:
            UsageError: something is held and not restored, or a followed loader has been iterated since.
            ForeignStateError: the run that is continued did not count its epochs so.
        """
        self._refuse_unrestored("epochs()")
        return self._loop.epochs(total)

    @property
    def epoch(self) -> int:
        """The current or next epoch of :meth:`epochs`."""
        return self._loop.epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch before the last commit; the start of a batch counter of your own."""
        self._loop.note_place_asked()
        return self._loop.batch

    def _refuse_unrestored(self, what: str) -> None:
        if self._resumption.due:
            raise UsageError(f"{what} before restore(): something is held; call session.restore() before training")

    # Commit

    def commit(
        self, step: int | None = None, gradients_pending: bool | None = None, *, epoch_over: bool = False
    ) -> bool:
        """End a record here, if this is a restore point: after the optimizer's step, with no gradient pending.

        Args:
            step: the framework's step number; None takes the one behind the last call's, which begins with 1. Each
                call counts, restore point or not: a batch of an accumulation, a step that a scaler skips.
            gradients_pending: whether a backward has run whose gradients no step has used yet; None lets the taps
                decide. Pass False where a scaler skipped the step, or where unused gradients are dropped.
            epoch_over: the loop over a :meth:`loader` is left after this batch although it has more.

        Raises:
            UsageError: the session is closed, or not restored; `step` is no whole number; the place in the data, or
                whether gradients are pending, cannot be known.
            UnsupportedError: inputs are uneven (join), or a backward is in a CUDA graph on several ranks.
            ResumeMismatchError: the first steps after a resume differ, with ``resume_check="require"``.
            DamagedStateError: the state behind a repeated step cannot be put back.

        Returns:
            True if this was a restore point. False if the record goes on, as gradients are being accumulated, or as
            an accumulation's remainder is behind the loop over a followed loader. In mode ``"snapshot"`` one restore
            point of `snapshot_every_steps` can be resumed, the others are taken again.
        """
        if self._closed:
            raise UsageError(f"commit() {self._closed_because}")
        self._refuse_unrestored("commit()")
        is_repetition = self._first_steps.repetition is not None
        with self._clock.in_commit(), self._copier.behind_training():
            self._loop.note_call(step is not None)
            refuse_join_context(self._data_parallel)
            self._recorder.cuda_graphs.refuse_hidden_backward(self._ranks.world_size, gradients_pending is not None)
            self._number = self._next_step() if step is None else _whole_number(step)
            if not self._is_restore_point(gradients_pending):
                return False  # the record goes on
            if not self._loop.check_record_end(epoch_over):
                return False
            if not is_repetition:
                self._first_steps.check_witness(self._number)
            # If user code raises here, the record goes on; the call has been counted.
            rank_state = self._rank_state.capture(self._tap.current.layout, self._recorder.pending.capture())
            self._rank_state.add_to_report = None  # it is complete: what is found from now on concerns later resumes
            point = RestorePoint(self._recorder.record, self._number, rank_state)
            self._end_step(point)
            if is_repetition:
                # The step has been taken before: it is compared, and the state that it led to then is put back.
                self._end_repetition(point)
            else:
                self._first_steps.check_following(point)
                # Errors of this make a gap in protection, and end no training.
                self._protection.end_record(point)
                self._launch.note_obeyed(self._link.attempt)
                if self._ranks.rank == 0:
                    self._logged.send_if_due(self._live.optimizers)
            self._recorder.mark_step_end_for_peers(point.record)
        if self._observers:
            # Observers get the frame of the loop that commits.
            self._tell_observers(point, is_repetition, sys._getframe(1))
        return True

    def _next_step(self) -> int:
        """The step number behind the last call's, or behind the restored one; the record's where there is neither."""
        if self._number is None:
            return self._recorder.record if self._resumption.held is None else self._resumption.held.step + 1
        return self._number + 1

    def _is_restore_point(self, gradients_pending: bool | None) -> bool:
        """Whether the record may end here; pending gradients are waived where the caller says that none is."""
        if self._ranks.world_size > 1 and self._tap.current.reductions == self._reductions_at_commit:
            # A batch without a reduction of all ranks belongs to the next record: its commit would not order the ranks.
            return False
        if gradients_pending is None:
            return self._recorder.pending.at_restore_point()
        if not gradients_pending:
            self._recorder.pending.waive()
        return not gradients_pending

    def _end_step(self, point: RestorePoint) -> None:
        """Count the step before its record is staged. Collective: the mode may change, and make a generation due."""
        self._reductions_at_commit = self._tap.current.reductions
        self._switch.update_mode(point.record)
        self._tuning.end_record(point.record)
        self._last = point
        self._rank_state.unrepeatable = ""
        self._loop.note_record_end()

    def _end_repetition(self, point: RestorePoint) -> None:
        """End the repeated step of the resumed record: compare, and go on from the held state."""
        try:
            writer, lost = self._first_steps.end_repetition(point), ""
            if writer is not None:
                self._resumption.adopt_writer(writer)
        except BaseException:  # raised again; a notebook may go on behind an interrupt, with half of either state
            self.close(finished=False)
            self._closed_because = "behind a restore that was cut off: make the model anew, and attach again"
            raise
        if writer is not None:
            try:
                self._protection.resume(writer, point.record)
            except AgentGoneError as error:
                lost = str(error)
        self._first_steps.tell_verdict()
        self._rank_state.made.override()
        if self.check.verdict == "equal":
            self._loop.prove()
        if lost:
            self._protection.lose_agent(point, lost)
        self._protection.begin_next_unless_begun(point.record)

    def _tell_observers(self, point: RestorePoint, is_repetition: bool, caller: FrameType) -> None:
        check, states = (self.check.verdict, self.check.line), self._rank_state
        committed = Committed(
            point.step,
            point.record,
            lambda: states.parts(codec.decode(point.rank_state)),
            caller,
            self.stall.total,
            is_repetition,
            self.agent_pid,
            check,
        )
        for each in self._observers:
            each.see_committed(committed)

    def log(self, values: Mapping[str, Any]) -> None:
        """Note losses that the script logs, of which ``memckpt report`` draws a sample every few seconds.

        Adapters call it with what goes to the framework's loggers. Tensors on a device are left out: nothing waits.
        """
        self._logged.note_losses(values)

    # Information

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
        return self._first_steps.check

    @property
    def report(self) -> RestoreReport | None:
        """What :meth:`restore` has returned, with what has shown since; None where training started over."""
        return self._first_steps.report

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
        """Newest step of which this node's part is in storage, in this attempt; None before the first."""
        return self._protection.stored_step

    @property
    def drift_ulp(self) -> float:
        """Largest difference between replica and live state that the audit has found, in ulp."""
        return self._protection.drift.largest_ulp

    def logger_metrics(self) -> dict[str, float]:
        """Those of :meth:`metrics` that go to the framework's loggers by the settings, named ``memckpt/...``."""
        choice = self._training.config.log_metrics
        found = self.metrics() if choice != "none" else {}
        return {f"memckpt/{name}": value for name, value in found.items() if choice == "all" or name in _MAIN_METRICS}

    def metrics(self) -> dict[str, float]:
        """Figures for loggers, always the same ones: `docs/observability.md` describes them.

        They are what this process knows, without asking anybody. `stall_ms` is that since the last call. Behind
        :meth:`close` they are the last ones.
        """
        if self._last_metrics is not None:
            return dict(self._last_metrics)
        stalled, self._stalled_before = self._clock.total - self._stalled_before, self._clock.total
        protection, link, report = self._protection, self._link, self.report
        record, writer = self._recorder.record - 1, self._staging.writer
        redone = link.connection.applied if link.up and self._switch.request.mode == "eager" else record
        at_peers = link.connection.watermark if link.up and self._peers.active else record
        return {
            "stall_ms": stalled * 1e3,
            "lag_steps": float(max(0, record - redone)),
            "drift_ulp": self.drift_ulp,
            "step": float(record),
            "resume_check": VERDICT_VALUES[self.check.verdict],
            **protection.stored_metrics(),
            "peers_lag_records": float(max(0, record - at_peers)),
            "held_bytes": float(writer.layout.total_bytes) if writer is not None else 0.0,
            "alarms": float(protection.alarms),
            "attempt": float(link.attempt),
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
        where = f"on node {self._ranks.node}, agent pid {self.agent_pid}{self._peers.describe()}"
        spec, tap = self._live.spec(self._switch.request), self._tap.current.name
        return describe_protection(spec, self.mode_reason, tap, where, self.caveats)

    # End

    def close(self, finished: bool = True, *, keep_held: bool = False) -> None:
        """End the session. Without `finished` the agent keeps the held state.

        With `finished` the agent writes the final step to storage, if storage is configured, and ends. This waits for
        it, up to the storage timeout. A next session of this process is then another training, with its own place.

        Args:
            finished: whether training has finished, and will not be resumed.
            keep_held: the agent keeps the held state though training has finished: no step of it was taken up.
        """
        if self._closed:
            return
        if not finished:
            self._say_what_stays()
        self._closed = True
        self._ordinal.note_closed(finished)
        finished = finished and not keep_held
        for each in self._observers:
            each.close()
        if finished and self._last is None and self._recorder.cuda_graphs.stepped:
            _log.warning(
                "memckpt: training has ended without a single commit, and nothing of it was protected: call "
                "session.commit() after each optimizer step"
            )
        if finished:
            self._resumption.say_if_nothing_was_left(self._number or 0)
        self._loop.release()
        self._link.finish_sending()
        last = self._last if self._last is not None else self._resumption.point  # which no step has followed
        stores = finished and self._training.config.storage is not None and self._link.up
        with self._copier.behind_training():
            if stores and last is not None and self._switch.capture_last(last):
                self._protection.end_gap(last)
        last_metrics = self.metrics()
        self._unhook()
        self._close_parts()
        for stored in self._link.close(finished):
            self._protection.note_stored(stored)
        self._last_metrics = last_metrics | self._protection.stored_metrics()
        if finished:
            self._resumption.resharding.delete_store()

    def _leave_in_child(self) -> None:
        """Stage and commit nothing in a forked process: its copy of the model is not the one that is protected."""
        self._recorder.drop_writer()
        self._closed = True
        self._closed_because = "in a forked process: expected it in the one that has called attach()"

    def _say_what_stays(self) -> None:
        """Say what stays held behind this process, for how long, and how to let go of it; nothing of a closed one."""
        last, writer = self._protection.last_held or self._resumption.point, self._staging.writer
        if self._closed or last is None or writer is None or self.agent_pid is None or self._ranks.rank:
            return
        held = f"{nbytes_text(writer.layout.total_bytes)}{' a rank' if self._ranks.world_size > 1 else ''}"
        seconds = seconds_text(self._training.config.agent.linger_seconds)
        _log.warning(
            "memckpt: step %d stays in memory (%s, agent pid %d) for %s: start again to go on from it, or let go of it "
            "with `memckpt stop %s`",
            *(last.step, held, self.agent_pid, seconds, self._run_dir),
        )

    def _unhook(self) -> None:
        """Remove all hooks from the user's objects, installed or not."""
        self._tap.remove()
        self._peers.stop_marking(self._recorder)
        self._step_hooks.remove()
        self._live.strangers.remove()
        self._mode.remove_test()
        self._preemption.remove()

    def _close_parts(self) -> None:
        self._staging.close()
        self._resumption.close()
        self._first_steps.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)


#: Sessions of this process that may not be closed when it ends.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _say_what_sessions_keep() -> None:
    for each in _sessions:
        each._say_what_stays()


def _leave_sessions_in_child() -> None:
    for each in _sessions:
        each._leave_in_child()


os.register_at_fork(after_in_child=_leave_sessions_in_child)
