"""The resume check: the comparison of an attempt's first steps with those of the dead attempt, and its verdict."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
import sys
from dataclasses import replace
from pathlib import Path

from memckpt.capture import data as dataloader
from memckpt.capture.evidence import Evidence
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps.tap import Tap
from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError, MemckptError, ResumeMismatchError
from memckpt.protocol.trainer import Checked
from memckpt.session.link import AgentLink
from memckpt.session.rank_state import EARLIER, RankState
from memckpt.session.ranks import LocalTraining, Ranks
from memckpt.session.resume.chosen import Chosen, ChosenInMemory
from memckpt.session.resume.first_steps import Repetition, Witness, compare_following
from memckpt.session.resume.report import RestoreReport, ResumeCheck, judge, judge_witness
from memckpt.session.staging import RestorePoint
from memckpt.user_messages import show_by_default

_log = logging.getLogger("memckpt")
#: Logger of verdicts, shown unless the application configures logging otherwise.
_check_log = logging.getLogger("memckpt.check")
#: File in the run directory; each line: digest of an environment, and its attempts since a repeated step was equal.
FILE = "proven"
#: Number of attempts after which a step is repeated again.
AGAIN = 10
#: Number of environments that are kept.
_MOST = 64
_LIBRARIES = ("memckpt", "torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")


class ResumeProof:
    """Compares the first steps of a resumed training with those of the dead attempt.

    There are three comparisons:

    - *repetition*: the resumed step is repeated, and the whole state after it is compared.
    - *witness*: the first gradients of the next step are compared with those that had been staged in its slot.
    - *following*: the step after a captured state is compared by its rank state and its sample.

    Attributes:
        repetition: the step that is being repeated; None while none is.
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

    # The restore

    def set_gradients_aside(self, chosen: ChosenInMemory, writer: SlotWriter, tap: Tap) -> None:
        """Copy the gradients that the dead attempt had staged of the next record, before its slot is reused."""
        self._evidence = writer.evidence
        if self.check.kind == "off" or chosen.following:
            return
        self._witness = witness = Witness(self._training.copier)
        if writer.snapshots:
            witness.decline("state is copied, gradients are not, and no step behind the captured one is known")
        elif tap.in_buckets and self._ranks.world_size > 2 and chosen.state["reduction"] is None:
            witness.decline("DDP of three or more ranks had not laid out its buckets for good by then")
        elif self._rank_state.never_repeatable:
            witness.decline(self._rank_state.never_repeatable)
        else:
            self._reduces = tap.in_buckets
            witness.set_aside(writer, chosen.plan.record + 1, tap.name)

    def begin_comparison(self, chosen: Chosen) -> None:
        """Begin the comparison, after the restore of tensors and gradients."""
        dataloader.departures.append(self.depart)
        if isinstance(chosen, ChosenInMemory):
            self._following = chosen.following
        if self.repetition is not None:
            self._recorder.begin_record(None, self.repetition.record)
            steps = self.repetition.steps
            self._recorder.compare_steps(steps.stepping if steps is not None else None)
        elif self.check.verdict not in ("pending", "off"):
            self.tell_verdict()
        if self._witness is not None:
            self._witness.note_left(self._reduces)
            if self._witness.waits:
                self._recorder.compare_gradients(self._witness.gradient)

    def depart(self, reason: str) -> None:
        """Correct the report: training has gone on with other data or gradients than it was left at."""
        if self.report is not None:
            self.report.because(reason)
            self._rank_state.carry([EARLIER + reason])

    # The first records

    def end_repetition(self, point: RestorePoint) -> SlotWriter | None:
        """Compare the state after the repeated step, and put the held one back; collective.

        Returns the writer of its generation, which the caller closes; None where a new one begins.
        """
        repetition, self.repetition = self.repetition, None
        self._recorder.compare_steps(None)
        assert repetition is not None
        self._link.finish_sending()
        try:
            self._training.copier.wait_before_changes()
            found = repetition.finish(point.rank_state, self._rank_state)
        except BaseException as error:
            if isinstance(error, MemckptError):
                self._proven.put_off()
            repetition.close()
            raise
        judge(self.check, found, self._training.any_accelerator(), f"step {repetition.step} was repeated")
        if self.check.verdict in ("equal", "rounding"):
            self._proven.note_equal()
        generation = repetition.held.generation
        return None if generation is None else generation.take_writer()

    def compare_first_records(self, point: RestorePoint) -> None:
        """Compare the first records after the resumed one; raises as :meth:`tell_verdict` does."""
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
        judge(self.check, everybody, self._training.any_accelerator(), what)
        self.tell_verdict()

    def _hear_witness(self, point: RestorePoint) -> None:
        """Compare gradients, at the end of the first record after the resumed one."""
        witness, self._witness = self._witness, None
        self._recorder.compare_gradients(None)
        if witness is None or self.check.refuted:
            return
        everybody = self._ranks.gather(witness.testify())
        # A verdict "none" has been logged already if the step could not be repeated.
        if self.check.verdict == "pending" or any(one.gradients for one in everybody):
            judge_witness(self.check, everybody, self._training.any_accelerator(), point.step)
            self.tell_verdict()

    def tell_verdict(self) -> None:
        """Log the verdict, and send it to the agent.

        Raises ResumeMismatchError on a difference with ``resume_check="require"``; on every rank.
        """
        check, config = self.check, self._training.config
        if check.verdict == "different" and not check.refuted:  # what the report has not said
            self._rank_state.carry([EARLIER + check.line.partition(";")[0]])
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
        if self.depart in dataloader.departures:
            dataloader.departures.remove(self.depart)
        self._witness = None
        repetition, self.repetition = self.repetition, None
        if repetition is not None:
            repetition.close()


class ProvenEnvironments:
    """Resolves ``"auto"`` for one attempt: a step is repeated until one was equal, and each tenth time; collective.

    Attributes:
        config: the settings, with ``"replay"`` or ``"witness"`` in place of ``"auto"``.
    """

    def __init__(self, config: MemckptConfig, run_dir: Path, ranks: Ranks) -> None:
        self._file = run_dir / FILE
        self._digest = ""
        self._writes = ranks.rank == 0
        self.config = config
        if config.resume_check != "auto":
            return
        self._digest = _digest(config, ranks.world_size)
        attempts = ranks.gather(self._noted().get(self._digest, AGAIN))[0]
        self.config = replace(config, resume_check="witness" if attempts < AGAIN else "replay")
        if attempts < AGAIN:
            self._write(attempts + 1)

    def _noted(self) -> dict[str, int]:
        try:
            lines = [line.split() for line in self._file.read_text(errors="replace").splitlines()]
        except OSError:  # nothing is proven; the other ranks wait for this one's answer
            return {}
        return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}

    def note_equal(self) -> None:
        """Note that a repeated step was equal in this environment."""
        self._write(1)

    def put_off(self) -> None:
        """Have the next attempt repeat no step: this one could not go on behind it."""
        self._write(AGAIN - 1)

    def _write(self, attempts: int) -> None:
        if not self._digest or not self._writes:
            return
        noted = self._noted()
        noted.pop(self._digest, None)
        noted[self._digest] = attempts
        written = self._file.with_name(f"{FILE}.new")
        try:
            written.write_text("".join(f"{one} {count}\n" for one, count in list(noted.items())[-_MOST:]))
            written.replace(self._file)
        except OSError as error:
            _log.info("memckpt: each resume repeats its last step, as that it was equal cannot be noted: %s", error)


def _digest(config: MemckptConfig, world_size: int) -> str:
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    libraries = [(name, getattr(sys.modules[name], "__version__", "")) for name in _LIBRARIES if name in sys.modules]
    known = [script.name, sys.argv[1:], platform.python_version(), libraries, repr(config), world_size]
    digest = hashlib.blake2b(repr(known).encode(), digest_size=16)
    digest.update(script.read_bytes() if script.is_file() else b"")
    return digest.hexdigest()
