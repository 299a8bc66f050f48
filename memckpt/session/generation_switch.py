"""When a new generation begins: decides it, writes the generation, and opens its records.

A *generation* is a fresh start of base and log. All ranks that share slots begin it after the same record.

One is due where no held generation can be gone on with, where a held one has other settings, and with peers. Also where
a record cannot be committed as it is staged; where the mode changes, by a self-test or a finding of the audit; at the
agent's order, and with another agent. Records up to `after` are committed as far as they can be staged.

Where none is due, and there is none to write to, the agent is told that records are void. It gave no slots, it was lost
(:class:`memckpt.session.protection.Protection` closes the generation), or ranks that share slots wait for its order.
"""

from __future__ import annotations

import logging
import time

from memckpt.capture.slot_writer import SlotWriter
from memckpt.processes.log import Seldom
from memckpt.protocol.trainer import Begin, Cleared, Drift
from memckpt.session.gradient_tap import GradientTap
from memckpt.session.link import AgentLink
from memckpt.session.mode import ModeChoice
from memckpt.session.ranks import LocalTraining
from memckpt.session.staging import Changes, RestorePoint, Staging

_log = logging.getLogger("memckpt")
_NOT_AUDITED = "since then the audit has not redone all parameters"
_NOT_GRADIENTS = (
    "An optimizer whose steps depend on more than gradients, groups and state does this, and a hook that changes "
    "parameters unseen"
)
_NOT_ALL_AUDITED = "The audit cannot redo all parameters of this training, so that nothing would say that redo is right"
#: What follows where redo was found to be wrong for the first time.
_AT_STEP = (
    "Something may have changed gradients unseen, so they are copied when the optimizer uses them, and each step waits "
    "for that. Later resumes count as exact once the audit has redone all parameters and found no difference. If there "
    'is another one, the whole state is copied in place of gradients, as redo="snapshot" does from the start'
)


class GenerationSwitch:
    """Knows when a generation is due, and begins it.

    Attributes:
        request: settings of the next generation.
        after: record after which the next generation begins; None while none is due.
        began: record after which the current generation began; 0 before the first.
    """

    def __init__(
        self,
        training: LocalTraining,
        link: AgentLink,
        staging: Staging,
        changes: Changes,
        mode: ModeChoice,
        tap: GradientTap,
    ) -> None:
        self._training = training
        self._ranks = training.ranks
        self._live = training.live
        self._recorder = training.recorder
        self._link = link
        self._staging = staging
        self._changes = changes
        self._mode = mode
        self._tap = tap
        self._seldom = Seldom()
        #: Number of the newest generation in which the audit has found something.
        self._distrusted = 0
        #: Whether a restore refuted what the held generation gave.
        self._resumed_refuted = False
        self._doubt = ""
        #: Number of the newest generation that the audit has gone over without a finding.
        self._cleared = 0
        self.after: int | None = None
        self.began = 0
        self.use_mode()

    @property
    def is_open(self) -> bool:
        """Whether the log goes on: no generation is due, and there is one to write to."""
        return self.after is None and self._staging.writer is not None

    @property
    def doubt(self) -> str:
        """Why the steps of now cannot be called exact: redo was wrong before, and was not compared since; or empty."""
        writer = self._staging.writer
        if self._doubt and writer is not None and writer.generation != self._distrusted:
            # The replica compares all pieces with their anchors in one period.
            applied = self._link.connection.applied if writer.spec.mode == "eager" else 0
            if writer.snapshots or self._cleared == writer.generation or applied >= self.began + writer.spec.period:
                self._doubt = ""
        return self._doubt and f"{self._doubt}; {_NOT_AUDITED}"

    def use_mode(self) -> None:
        """Use the current mode from the next generation on."""
        self._staging.not_redoable = self._mode.not_redoable
        self._recorder.record_steps(self._mode.redoes)
        self.request = self._mode.request(self._training.copier.asynchronous)

    # Events

    def start(self, after: int | None) -> None:
        """Begin the attempt; its first generation begins after that record, or is a held one (None)."""
        self.after = after

    def resume(self, writer: SlotWriter, record: int, anew: bool) -> None:
        """Go on behind a restored record, in its generation where the settings are the same, unless `anew`; collective.

        Raises:
            MemoryBudgetError: there is no room for the slots of the held generation.
        """
        if self._all_fit(writer) and not anew and not self._resumed_refuted:
            self.enter_record(record + 1)
            return
        if self._resumed_refuted:
            self._distrusted = writer.generation  # what the audit has found in it is the same
        # Other settings than the last attempt's, or a state that has grown, or peers that need all of it; or some of
        # its steps were not redone as they were.
        self._recorder.begin_record(None, record + 1)
        same = (writer.spec.mode, writer.spec.every) == (self.request.mode, self.request.every)
        self.after = self._next_common(record + 1) if same else record + 1

    def _all_fit(self, writer: SlotWriter) -> bool:
        """Whether a held generation has the layout of now, for all ranks that share its slots; collective.

        One that went on in it alone would wait for slots that the others never commit.
        """
        growth = self._live.growth
        everybody = self._ranks.gather((self._live.spec(self.request) == writer.spec, growth.changing, growth.apart))
        fits, changing, apart = zip(*(everybody[rank] for rank in self._ranks.unit), strict=True)
        growth.changing.update(*changing)
        growth.apart.update(*apart)
        return all(fits)

    def update_mode(self, record: int) -> None:
        """Change the mode where the self-test is over, or steps cannot be redone, on all ranks at the same record."""
        if self._mode.after_record(self._recorder.compiled, self._changes.persistent, record):
            self.use_mode()
            self.after = record

    def obey(self, order: Begin) -> None:
        """Follow the agent's order to all local ranks; a second order for the current generation is ignored."""
        self._live.growth.changing |= order.changing
        self._live.growth.apart |= order.apart
        if order.at_step_because:
            self._tap.take_at_step(order.at_step_because)
        if order.record > self.began:
            self.after = self._next_common(order.record)

    def lose_replica(self, reason: str) -> None:
        """Use lazy redo from the next generation on: the agent's redo has failed."""
        self._recorder.fail(reason)
        if self.request.mode == "eager":
            self._mode.fall_back(f"the agent's redo failed: {reason}")
            self.use_mode()

    def distrust(self, drift: Drift) -> None:
        """Act upon what the audit has found in the current generation, once: its steps are not redone as they were.

        First gradients are taken after the step, as they are, for what changes them unseen. If that was done before,
        snapshots by value replace redo.
        """
        writer = self._staging.writer
        if writer is None or drift.generation != writer.generation or drift.generation == self._distrusted:
            return  # it is acted upon already
        self._distrusted = drift.generation
        found = str(drift)
        self._doubt = found
        if self._recorder.streams and self._mode.mode != "snapshot":
            self._tap.take_at_step(
                f"{found}. Resumes of these steps, and of all until the whole state is written anew, are not exact, "
                f"and say so. {_AT_STEP}"
            )
            self._recorder.fail(found)
        else:
            self._mode.distrust(found, _NOT_GRADIENTS)

    def handle_cleared(self, notice: Cleared) -> None:
        """Trust redo again, where nothing is wrong with any piece; where some cannot be audited, give it up.

        Else every later resume would be called not exact for what was found once.
        """
        if notice.whole:
            self._cleared = notice.generation
        elif self._doubt and notice.generation != self._distrusted:
            self._mode.distrust(self._doubt, _NOT_ALL_AUDITED)

    def distrust_resumed(self, refuted: str) -> None:
        """Act upon a held state that a restore refuted, as upon a finding; on all ranks, before training goes on."""
        if self._mode.mode == "snapshot":
            return
        self._resumed_refuted, self._doubt = True, refuted
        audited = self._mode.mode == "eager" or self._training.config.audit_budget > 0
        if audited and any(self._ranks.gather(self._recorder.streams)):
            self._tap.take_at_step(f"{refuted}. {_AT_STEP}")
        else:
            self._mode.cannot_redo(refuted)
            self.use_mode()

    def rejoin(self, record: int) -> None:
        """Go on with a new agent, which holds nothing. Ranks that share slots wait for its order."""
        self.after = self._next_common(record) if len(self._ranks.unit) == 1 else None

    def capture_last(self, point: RestorePoint) -> bool:
        """Write a generation for the final step, where the agent could not bring it to storage; True if it was written.

        That is so where every N-th step is captured, and where only this process can redo steps.
        """
        only_here = self._mode.mode == "lazy" and bool(self._live.redone_only_here)
        if point.record == self.began or not (only_here or self._staging.commits_uncaptured(point.record)):
            return False
        if not self._staging.stands_at(point.record) if only_here else self._staging.moved:
            _log.warning("memckpt: parameters were changed since step %d, which storage will not have", point.step)
            return False
        try:
            self.write_generation(point)
        except Exception as error:
            _log.warning("memckpt: the final step %d cannot be captured: %s", point.step, error)
            return False
        return True

    # Decision

    def is_due(self, record: int) -> bool:
        """Whether a generation begins after `record`."""
        return self.after is not None and record >= self.after

    def make_due_if_ranks_differ(self, record: int) -> None:
        """Make a generation due where ranks that share slots had different values of what they share."""
        if self._staging.ranks_disagree(record):
            self.after = record

    def _next_common(self, record: int) -> int:
        """The first record, from this one on, that all ranks capture: captured records must be common to all."""
        if self.request.mode != "snapshot" or len(self._ranks.unit) == self._ranks.world_size:
            return record
        every = self.request.every
        return -(-record // every) * every

    def find_problem(self) -> str | None:
        """Why this record cannot be committed as it is staged, in words; None if it can.

        What is found takes effect: gradients are taken at the step, changed tensors copied by value from now on.
        """
        if self._recorder.tap_mismatch is not None:
            self._tap.take_at_step(self._recorder.tap_mismatch)
        if self._recorder.problem is not None:
            return self._recorder.problem
        changed = self._changes.static_changes()
        if changed:
            self._live.growth.changing.update(changed)
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return f"{changed[0]}{others} changed and will be staged with every record from now on"
        if self._staging.outgrown(self._recorder.record, self.request):
            return "parameters or groups have changed"
        return self._changes.problem

    def order_generation(self, record: int, reason: str) -> None:
        """Make a generation due, unless one is: now, or after a record that all ranks that share the slots reach."""
        if self.after is not None:
            return
        if (more := self._seldom.count()) is not None:  # weights that a script clips change at every step
            _log.info("memckpt: the state is copied anew: %s%s", reason, more)
        begin = self._next_common(record)
        if len(self._ranks.unit) == 1:
            self.after = begin
            return
        changing = frozenset(self._live.growth.changing)
        self.obey(self._link.ask_for_generation(max(begin, record + 1), reason, changing, self._tap.at_step_because))

    # Writing

    def write_generation(self, point: RestorePoint) -> None:
        """Write the whole state by value, and adopt its generation."""
        record = point.record
        self._link.finish_sending()
        started = time.perf_counter()
        spec = self._live.spec(self.request)
        regions = self._staging.take_prepared(spec) or self._link.prepare(spec, record, reason=self._mode.reason)
        writer, commit = self._staging.write_generation(regions, point)
        try:
            self._link.connection.applied = record
            self._link.send(commit)
        except BaseException:  # raised again: until it is adopted the writer has no other owner
            writer.close()
            raise
        self._staging.adopt_writer(writer)
        self.warn_of_state_left_out()
        self.after, self.began = None, record
        self._changes.problem = None
        self._recorder.check.restart()
        self._recorder.pending.regroup()
        self._tap.reinstall()  # parameters may have been unfrozen since
        _log.debug("memckpt: generation %d began in %.3f s", writer.generation, time.perf_counter() - started)

    def enter_record(self, record: int) -> None:
        """Wait for the next record's slot, and open it: its anchors are copied."""
        writer = self._staging.writer
        assert writer is not None
        if not writer.whole:
            if not self._link.make_slots(writer.generation):
                self._staging.drop()
                self._recorder.begin_record(None, record)
                return
            writer.use_all_slots(record)
        self._recorder.clock.slot_wait += self._link.wait_for_room(record, writer.spec, self.began)
        self._staging.open_slot(record)

    def warn_of_state_left_out(self) -> None:
        """Log once each part of the optimizers that no record can hold."""
        caveats = self._training.caveats
        for text in [text for text in self._live.left_out if text not in caveats]:
            _log.warning(
                "memckpt: a resume of this run will not be exact: %s, and is as the new process makes it", text
            )
            caveats.append(text)
