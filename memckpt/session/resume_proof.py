"""The resume check of an attempt's first steps, and its verdict."""

from __future__ import annotations

import contextlib
import logging

from memckpt import dataloader
from memckpt.capture.evidence import Evidence
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps.ddp import BucketTap
from memckpt.capture.taps.tap import Tap
from memckpt.errors import AgentGoneError, MemckptError, ResumeMismatchError
from memckpt.protocol.trainer import Checked
from memckpt.session.chosen import Chosen, ChosenInMemory
from memckpt.session.link import AgentLink
from memckpt.session.proven import ProvenEnvironments
from memckpt.session.rank_state import RankState
from memckpt.session.ranks import LocalTraining
from memckpt.session.repetition import Repetition, any_accelerator, compare_following
from memckpt.session.report import RestoreReport
from memckpt.session.resume_check import ResumeCheck, judge, judge_witness, prove
from memckpt.session.staging import RestorePoint
from memckpt.session.witness import Witness
from memckpt.user_messages import show_by_default

_log = logging.getLogger("memckpt")
#: Logger of verdicts, shown unless the application configures logging otherwise.
_check_log = logging.getLogger("memckpt.check")


class ResumeProof:
    """Compares the first steps of a resumed training with those of the dead attempt.

    There are three comparisons:

    - *repetition*: the resumed step is repeated, and the whole state after it is compared.
    - *witness*: the first gradients of the next step are compared with those that had been staged in its slot.
    - *following*: the step after a captured state is compared by its rank state and its sample.

    Args:
        training: training that is resumed.
        link: connection to the agent, which reports the verdict.
        rank_state: compares rank states part by part.
        proven: notes that a repeated step was equal.

    Attributes:
        check: the verdict, and the differences that led to it.
        repetition: the step that is being repeated; None while none is.
        report: report of the restore; None before it.
    """

    def __init__(
        self, training: LocalTraining, link: AgentLink, rank_state: RankState, proven: ProvenEnvironments
    ) -> None:
        self._training = training
        self._ranks = training.ranks
        self._recorder = training.recorder
        self._link = link
        self._rank_state = rank_state
        self._proven = proven
        choice = training.config.resume_check
        self.check = ResumeCheck(choice, "off" if choice == "off" else "pending")
        self.repetition: Repetition | None = None
        self.report: RestoreReport | None = None
        self._witness: Witness | None = None
        #: Whether gradients come in buckets, reduced over all ranks.
        self._reduces = False
        self._following: dict[int, bytes] = {}
        self._evidence: Evidence | None = None

    @property
    def repeated(self) -> int | None:
        """The step that is repeated, from the state before it; None if no step is."""
        check = self.check
        return check.step if check.kind in ("replay", "require") and check.verdict == "pending" else None

    # The restore

    def set_gradients_aside(self, chosen: ChosenInMemory, writer: SlotWriter, tap: Tap) -> None:
        """Copy the gradients that the dead attempt had staged of the next record, before its slot is reused."""
        self._evidence = writer.evidence
        if self.check.kind == "off" or chosen.following:
            return
        self._witness = witness = Witness(self._training.copier)
        if writer.snapshots:
            witness.decline("state is copied, gradients are not, and no step behind the captured one is known")
        elif isinstance(tap, BucketTap) and self._ranks.world_size > 2 and chosen.state["reduction"] is None:
            witness.decline("DDP of three or more ranks had not laid out its buckets for good by then")
        elif self._rank_state.never_repeatable:
            witness.decline(self._rank_state.never_repeatable)
        else:
            self._reduces = isinstance(tap, BucketTap)
            witness.set_aside(writer, chosen.plan.record + 1, tap.name)

    def begin(self, chosen: Chosen) -> None:
        """Begin the comparison, after the restore of tensors and gradients."""
        dataloader.departures.append(self._depart)
        if isinstance(chosen, ChosenInMemory):
            self._following = chosen.following
        if self.repetition is not None:
            self._recorder.begin(None, self.repetition.record)
            steps = self.repetition.steps
            self._recorder.compare_steps(steps.stepping if steps is not None else None)
        elif self.check.verdict not in ("pending", "off"):
            self.tell()
        if self._witness is not None:
            self._witness.note_left(self._reduces)
            if self._witness.waits:
                self._recorder.compare_gradients(self._witness.gradient)

    def _depart(self, reason: str) -> None:
        """Correct the report: a loader has gone on with other data than it was left at."""
        if self.report is not None:
            self.report.because(reason)

    # The first records

    def end_repetition(self, point: RestorePoint) -> tuple[SlotWriter | None, str]:
        """Compare the state after the repeated step, and put the held one back; collective.

        Returns:
            Writer of the generation that holds the record, which the caller closes, None where a new one begins; and
            why the agent is lost, in words, empty if it is not.
        """
        repetition, self.repetition = self.repetition, None
        self._recorder.compare_steps(None)
        assert repetition is not None
        self._link.finish_sending()
        found = None
        try:
            self._training.copier.wait_before_changes()
            found = repetition.finish(point.rank_state, self._rank_state)
        except MemckptError:
            self._proven.put_off()
            raise
        finally:
            if found is None:
                repetition.close()
        what = f"step {repetition.step} was repeated"
        if found is None:
            self.check.settle("none", f"{what}, but its agent has gone, and what it held with it")
            return None, "the agent has gone"
        everybody, sampled = found
        accelerated = any_accelerator(self._training.live, self._ranks)
        proof = prove(sampled, accelerated, repetition.step, "where it was put back")
        if proof.differs:
            self.check.prove(proof)
        judge(self.check, everybody, accelerated, what)
        if self.check.verdict in ("equal", "rounding"):
            self._proven.note_equal()
        return repetition.held.take_writer(), ""

    def end_record(self, point: RestorePoint) -> None:
        """Compare the first records after the resumed one.

        Raises:
            ResumeMismatchError: a difference, with ``resume_check="require"``; on every rank.
        """
        self._compare_following(point)
        self._hear_witness(point)

    def _compare_following(self, point: RestorePoint) -> None:
        """Compare the rank state of the step after a captured state, of which no more is known."""
        held = self._following.pop(point.record, None)
        if held is None:
            return
        assert self._evidence is not None
        everybody = compare_following(point.rank_state, held, self._evidence, self._rank_state, self._ranks)
        what = f"step {point.step} was taken again, and compared by a sample"
        judge(self.check, everybody, any_accelerator(self._training.live, self._ranks), what)
        self.tell()

    def _hear_witness(self, point: RestorePoint) -> None:
        """Compare gradients, at the end of the first record after the resumed one."""
        witness, self._witness = self._witness, None
        self._recorder.compare_gradients(None)
        if witness is None or self.check.refuted:
            return
        everybody = self._ranks.gather(witness.testify())
        # A verdict "none" has been logged already if the step could not be repeated.
        if self.check.verdict == "pending" or any(one.gradients for one in everybody):
            judge_witness(self.check, everybody, any_accelerator(self._training.live, self._ranks), point.step)
            self.tell()

    def tell(self) -> None:
        """Log the verdict, and send it to the agent.

        Raises:
            ResumeMismatchError: a difference, with ``resume_check="require"``; on every rank.
        """
        check, config = self.check, self._training.config
        if check.verdict == "different":
            # Later resumes go on from a state that has this difference in it, and would call themselves exact.
            self._rank_state.carry([f"an earlier resume was not exact: {check.line.partition(';')[0]}"])
        if self._ranks.rank == 0:
            level = logging.WARNING if check.verdict == "different" else logging.INFO
            show_by_default(_check_log)
            _check_log.log(level, "memckpt: resume check: %s", check.line)
            if self._link.up:
                with contextlib.suppress(AgentGoneError):  # the next commit finds that, and says so
                    self._link.send(Checked(check.verdict, check.line))
        if check.verdict != "different" or config.resume_check != "require":
            return
        if config.accept_changes:
            _log.warning("memckpt: training goes on all the same, as accept_changes says")
            return
        raise ResumeMismatchError(
            f"resume_check='require': expected training to repeat what is held, found: {check.line}. What was "
            "held is still held: mend the script and start again, or start once with accept_changes=True"
        )

    def close(self) -> None:
        """Release states and gradients that were not compared."""
        if self._depart in dataloader.departures:
            dataloader.departures.remove(self._depart)
        self._witness = None
        repetition, self.repetition = self.repetition, None
        if repetition is not None:
            repetition.close()
