"""Comparison of a resume's first steps with those of the dead attempt: of gradients that it left, or a whole step.

*Witness*: the gradients that had landed of the next step are copied before their slot is reused, and compared as
backward computes them again. One near the loss depends on most of a forward: on parameters, data and generators.

*Repetition*: training restores the state before the resumed record and takes its step again. No record is staged
meanwhile. At the commit the ordinary restore puts the held state back over copies of what there is, which are compared
with it. So training goes on from the held state with any verdict.

At the end: where a repeated step was equal, for the choice of ``resume_check="auto"``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.optim import Optimizer

from memckpt.capture.copier import Copier
from memckpt.capture.data.iteration import departures
from memckpt.capture.evidence import Evidence
from memckpt.capture.live_state import LiveState
from memckpt.capture.slot_writer import SlotWriter
from memckpt.capture.taps.tap import Tap
from memckpt.config import MemckptConfig
from memckpt.errors import AgentGoneError, DamagedStateError, MemckptError, ResumeMismatchError
from memckpt.memory.slots import Landing
from memckpt.protocol.trainer import Checked
from memckpt.recovery.comparison import Comparison, Difference, Findings
from memckpt.session.link import AgentLink
from memckpt.session.rank_state import EARLIER, RankState
from memckpt.session.ranks import LocalTraining, Ranks
from memckpt.session.resume.chosen import Chosen, ChosenInMemory, exchange_slices
from memckpt.session.resume.report import RestoreReport, ResumeCheck, Testimony, judge, judge_witness
from memckpt.session.staging import RestorePoint
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep
from memckpt.state.redo import GradientSource, apply_ops
from memckpt.state.tensors import Distance, local, same_bits, version
from memckpt.user_messages import show_by_default

_log = logging.getLogger("memckpt")
#: Logger of verdicts, shown unless the application configures logging otherwise.
_check_log = logging.getLogger("memckpt.check")
#: Limit on the gradients that a rank sets aside, in bytes.
WITNESS_BYTES = 64 << 20
_ADDED = "what had landed was added to gradients that were used and not zeroed"
_NONE_YET = "the dead attempt had no gradients of the next step yet"
#: Maximum number of differences that are kept.
_NAMED = 8
#: File in the run directory; each line: digest of an environment, and its attempts since a repeated step was equal.
PROVEN_FILE = "proven"
#: Number of attempts after which a step is repeated again.
PROVEN_AGAIN = 10
#: Number of environments that are kept.
_MOST_PROVEN = 64
_LIBRARIES = ("memckpt", "torch", "numpy", "lightning", "pytorch_lightning", "accelerate", "transformers")


class FirstSteps:
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
        #: Reasons that made this rank's report inexact, until all ranks have them; None: they have.
        self._departed: list[str] | None = None

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
        departures.append(self.depart)
        self._departed = []
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
        if self._departed is not None:
            self._departed.append(reason)

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
            rank_state = point.rank_state
            found = self._ranks.together(lambda: repetition.put_back(rank_state, self._rank_state))
            if lacking := exchange_slices(repetition.held, self._training.live, self._ranks):
                raise DamagedStateError(f"resume: expected the state after step {repetition.step}, but {lacking}")
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

    def check_following(self, point: RestorePoint) -> None:
        """Compare the rank state of the step after a captured state, of which no more is known.

        Raises as :meth:`tell_verdict` does.
        """
        held = self._following.pop(point.record, None)
        if held is None:
            return
        assert self._evidence is not None
        comparison, before = Comparison(), codec.decode(held)
        self._rank_state.compare(codec.decode(point.rank_state), before, comparison)
        comparison.sample(self._evidence.pairs(before["evidence"]))
        everybody = self._ranks.gather(comparison.findings())
        what = f"step {point.step} was taken again, and compared by a sample"
        judge(self.check, everybody, self._training.any_accelerator(), what)
        self.tell_verdict()

    def check_witness(self, step: int) -> None:
        """Compare gradients at the end of the first record after the resumed one, and correct all ranks' reports alike.

        The record's rank state is not captured yet, and carries what is found. Raises as :meth:`tell_verdict` does.
        """
        departed, self._departed = self._departed, None
        if departed is not None and self.report is not None:
            self.report.because(*(reason for each in self._ranks.gather(departed) for reason in each))
        witness, self._witness = self._witness, None
        self._recorder.compare_gradients(None)
        if witness is None or self.check.refuted:
            return
        everybody = self._ranks.gather(witness.testify())
        # A verdict "none" has been logged already if the step could not be repeated.
        if self.check.verdict == "pending" or any(one.gradients for one in everybody):
            judge_witness(self.check, everybody, self._training.any_accelerator(), step)
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
        if self.depart in departures:
            departures.remove(self.depart)
        self._witness = None
        repetition, self.repetition = self.repetition, None
        if repetition is not None:
            repetition.close()


@dataclass
class _Kept:
    """A gradient that was set aside, or its first elements.

    Attributes:
        fired: number of gradients that backward has computed for the parameter since.
        found: the new gradient, while it is being copied.
        compared: whether they are compared, or the copy has begun.
        left: gradient of the parameter when it was restored, and its version counter; None if there was none.
        added: whether backward has added to `left` without a zeroing in between.
    """

    name: str
    landing: Landing
    held: torch.Tensor
    param: torch.Tensor
    fired: int = 0
    found: torch.Tensor | None = None
    difference: Difference | None = None
    compared: bool = False
    left: tuple[torch.Tensor, int] | None = None
    added: bool = False


class Witness:
    """Gradients of a record that one rank has set aside. Taps call :meth:`gradient`, which never raises."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._kept: dict[int, _Kept] = {}  # by id() of the parameter, which `_Kept` keeps alive
        self._problem = ""
        self._reduces = False
        self._left_looked_at = False

    def set_aside(self, writer: SlotWriter, record: int, tap: str) -> None:
        """Copy the gradients staged for `record`, in their order, before its slot is reused. Never raises."""
        try:
            self._problem = self._set_aside(writer, record, tap, WITNESS_BYTES)
        except Exception as error:  # a resume never fails for that: it becomes the reason of the verdict
            _log.exception("memckpt: setting gradients aside failed")
            self.decline(f"setting gradients aside failed: {type(error).__name__}: {error}")

    def note_left(self, reduces: bool) -> None:
        """Note the restored gradients, which are zeros also where the dead attempt had others. Taps are installed.

        With `reduces` gradients come in buckets, so that several are accumulated before the first is seen.
        """
        self._reduces = reduces
        # No tap sees the gradient of a parameter that is frozen now, and unfrozen before the next backward.
        self._kept = {key: kept for key, kept in self._kept.items() if kept.param.requires_grad}
        for kept in self._kept.values():
            gradient = kept.param.grad
            kept.left = None if gradient is None else (gradient, version(gradient))

    def _mark_added_to(self, fired: torch.Tensor) -> None:
        """Mark gradients that are accumulated into restored zeros, also where the dead attempt had others."""
        for kept in self._kept.values():
            gradient = kept.param.grad
            if kept.left is not None and gradient is kept.left[0]:
                moves = 1 if self._reduces or kept.param is fired else 0
                kept.added = version(gradient) <= kept.left[1] + moves

    def decline(self, reason: str) -> None:
        """Drop all gradients: there is nothing to compare with, for this reason."""
        self._kept.clear()
        self._problem = reason

    def _set_aside(self, writer: SlotWriter, record: int, tap: str, room: int) -> str:
        before = None if writer.landings is None else writer.landings.tap(record)
        if before is None or writer.landings is None:
            return _NONE_YET
        if before != tap:
            return f"the dead attempt took its gradients by another tap ({before}, now {tap})"
        landed = sorted(writer.landings.landed(record), key=lambda one: one.order)
        if not landed:
            return _NONE_YET
        for one in landed:
            staged = writer.gradient_places.staged(record, writer.owners[one.param][0], 0, one.param).reshape(-1)
            staged = staged[: room // staged.element_size()]
            if staged.numel():  # shards may be empty, and so may what is left of the room
                room -= staged.nbytes
                param = writer.params[one.param]
                self._kept[id(param)] = _Kept(writer.spec.params[one.param].tensor.name, one, staged.clone(), param)
        return ""

    @property
    def waits(self) -> bool:
        """Whether gradients are still to be compared."""
        return bool(self._kept)

    # While backward runs

    def gradient(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Compare a gradient that backward has computed, if it is the one that was staged."""
        if not self._left_looked_at:
            self._left_looked_at = True
            self._mark_added_to(param)
        kept = self._kept.get(id(param))
        if kept is None or kept.compared:
            return
        kept.fired += 1
        if kept.fired < kept.landing.firing:
            return
        kept.compared = True
        try:
            self._compare_gradient(kept, gradient)
        except Exception as error:  # a hook must not end the user's training: it becomes the reason of the verdict
            self._give_up(kept, error)

    def _give_up(self, kept: _Kept, error: Exception) -> None:
        del self._kept[id(kept.param)]
        self._problem = self._problem or f"comparing {kept.name} failed: {type(error).__name__}: {error}"

    def _compare_gradient(self, kept: _Kept, gradient: torch.Tensor) -> None:
        found = local(gradient.detach())
        if found.is_sparse or found.dtype != kept.held.dtype:
            layout = "sparse" if found.is_sparse else f"{found.dtype}"
            kept.difference = Difference("gradient", kept.name, f"{layout} in place of dense {kept.held.dtype}")
            return
        found = found.reshape(-1)[: kept.held.numel()]
        if not self._copier.asynchronous:
            _compare(kept, found)
            return
        kept.found = torch.empty_like(kept.held, pin_memory=found.device.type != "cpu")
        self._copier.copy(kept.found, found)

    # At the commit

    def testify(self) -> Testimony:
        """The result, at the end of the record. Waits for copies that have begun. Never raises."""
        self._copier.token()()
        for kept in list(self._kept.values()):
            try:
                if kept.found is not None:
                    _compare(kept, kept.found)
            except Exception as error:  # the user's training goes on: it becomes the reason of the verdict
                self._give_up(kept, error)
        kept_ones, self._kept = self._kept, {}
        testimony = Testimony(problem=self._problem)
        for kept in kept_ones.values():
            testimony.gradients += 1
            testimony.nbytes += kept.held.nbytes
            if kept.difference is not None and kept.added and _is_used(kept.param):
                testimony.gradients -= 1
                testimony.nbytes -= kept.held.nbytes
                testimony.problem = testimony.problem or _ADDED
                continue
            if not kept.compared:
                kept.difference = Difference("gradient", kept.name, "not made, and the dead attempt had made it")
            if kept.difference is not None:
                testimony.differing += 1
                if len(testimony.differences) < _NAMED:
                    testimony.differences.append((kept.landing.order, kept.difference))
        return testimony


def _is_used(param: torch.Tensor) -> bool:
    """Whether the gradient keeps its value after the step: the loop zeroes gradients before a backward.

    Then the dead attempt had accumulated into values that a resume does not have. They are zeroed before an optimizer
    uses them; otherwise they would be pending. A loop that zeroes before its commit had zeros there, as a resume has.
    """
    gradient = param.grad
    return gradient is not None and bool(local(gradient).any())


def _compare(kept: _Kept, found: torch.Tensor) -> None:
    kept.found = None
    if same_bits(found, kept.held):
        return
    distance = Distance()
    distance.add(found, kept.held)
    dtype = str(kept.held.dtype).removeprefix("torch.")
    kept.difference = Difference("gradient", kept.name, distance.text, distance.relative, distance.ulp, dtype)


class RepeatedSteps:
    """Compares each optimizer step with the recorded one, by the gradients that the dead attempt had staged.

    Differences of gradients only explain a verdict: the state behind the step is compared anyway.

    `problem`: why steps could not be compared, in words; empty if they could.
    """

    def __init__(
        self,
        live: LiveState,
        params: Sequence[torch.Tensor],
        layout: Layout,
        meta: RecordMeta,
        gradients: GradientSource,
    ) -> None:
        self._live = live
        self._params = params
        self._layout = layout
        self._meta = meta
        self._gradients = gradients
        self._taken: dict[int, int] = {}
        self.comparison = Comparison()
        self.problem = ""

    def stepping(self, number: int, optimizer: Optimizer) -> None:
        """Compare a step that an optimizer is about to take. Never raises."""
        try:
            self._compare(number, optimizer)
        except Exception as error:  # becomes the reason of the verdict
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def _compare(self, number: int, optimizer: Optimizer) -> None:
        index = self._taken.get(number, 0)
        self._taken[number] = index + 1
        held = next((one for one in self._meta.sub_steps if (one.optimizer, one.index) == (number, index)), None)
        label = self._label(number, index)
        if held is None:
            self.comparison.absence(label, "taken", "not taken")
            return
        self.comparison.value("hyperparameters", label, hyperparameters(optimizer), codec.decode(held.groups))
        for param in self._layout.optimizer_params(number):
            if not self._layout.spec.params[param].tensor.elsewhere:
                self._compare_gradient(param, held)

    def _compare_gradient(self, index: int, held: SubStep) -> None:
        name = self._layout.spec.params[index].tensor.name
        found = self._params[index].grad
        if (found is None) != (index in held.absent):
            presence = ("None", "a tensor")
            self.comparison.absence(f"gradient of {name}", presence[found is not None], presence[found is None])
        elif found is not None:
            staged = self._gradients(self._meta, held, index)
            if staged is None or found.is_sparse or staged.is_sparse:
                return
            # What a fused step divides by, it does within.
            ops = [op for op in held.ops if op.kind != "div"]
            used = apply_ops(staged.to(local(found).device), ops, index)
            self.comparison.tensor("gradient", name, local(found), used)

    def _label(self, number: int, index: int) -> str:
        name = type(self._live.optimizers[number]).__name__
        return f"step {index + 1} of {name} (optimizer {number})"

    def end_steps(self) -> None:
        """End the record: recorded steps that were not taken are differences, too."""
        if self.problem:
            return
        for held in self._meta.sub_steps:
            if held.index >= self._taken.get(held.optimizer, 0):
                self.comparison.absence(self._label(held.optimizer, held.index), "not taken", "taken")


class Repetition:
    """One repeated step, from the restore of the state before it to its commit. Owns the state after it.

    `steps` compares optimizer steps; None where the record has none: its state was captured, or is a checkpoint.
    """

    def __init__(
        self,
        held: Chosen,
        write: Callable[[Chosen, Comparison], object],
        live: LiveState,
    ) -> None:
        self.record, self.step = held.held.record, held.held.step
        self.held = held
        self._write = write
        self._live = live
        self.steps: RepeatedSteps | None = None
        known = held.recorded_steps(live)
        if known is not None:
            self.steps = RepeatedSteps(live, *known)

    def close(self) -> None:
        """Release the held record; training ends before the step does."""
        if self.held.generation is not None:
            self.held.generation.close()

    def put_back(self, rank_state: bytes, states: RankState) -> Findings:
        """Compare the live state with the held one, and put the held one back.

        Raises DamagedStateError where the held state cannot be put back.
        """
        try:
            return self._put_back(rank_state, states)
        except Exception as error:  # redo runs the user's classes with what was recorded
            raise DamagedStateError(
                f"resume: expected to put the state after step {self.step} back, which was repeated, found "
                f"{type(error).__name__}: {error}. What was held is still held: start again with "
                "resume_check='witness' (with 'auto' the next start repeats no step), which leaves such a state for an "
                "older one"
            ) from error

    def _put_back(self, rank_state: bytes, states: RankState) -> Findings:
        comparison = Comparison()
        if self.steps is not None:
            self.steps.end_steps()
            comparison = self.steps.comparison
            comparison.problem = self.steps.problem
        held = self.held.state
        differing = states.compare(codec.decode(rank_state), held, comparison)
        if "optimizers" in held:
            found = self._live.capture_optimizers(self.held.spec)
            comparison.value("state", "optimizers", found, held["optimizers"])
        self._write(self.held, comparison)
        states.put_back({name: held["provided"][name] for name in differing})
        rng.restore(held["rng"])
        return comparison.findings(self._live.tensors())


class ProvenEnvironments:
    """Resolves ``"auto"`` for one attempt: a step is repeated until one was equal, and each tenth time; collective.

    Attributes:
        config: the settings, with ``"replay"`` or ``"witness"`` in place of ``"auto"``.
    """

    def __init__(self, config: MemckptConfig, run_dir: Path, ranks: Ranks) -> None:
        self._file = run_dir / PROVEN_FILE
        self._digest = ""
        self._writes = ranks.rank == 0
        self.config = config
        if config.resume_check != "auto":
            return
        self._digest = _digest(config, ranks.world_size)
        attempts = ranks.gather(self._noted().get(self._digest, PROVEN_AGAIN))[0]
        self.config = replace(config, resume_check="witness" if attempts < PROVEN_AGAIN else "replay")
        if attempts < PROVEN_AGAIN:
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
        self._write(PROVEN_AGAIN - 1)

    def _write(self, attempts: int) -> None:
        if not self._digest or not self._writes:
            return
        noted = self._noted()
        noted.pop(self._digest, None)
        noted[self._digest] = attempts
        written = self._file.with_name(f"{PROVEN_FILE}.new")
        try:
            written.write_text("".join(f"{one} {count}\n" for one, count in list(noted.items())[-_MOST_PROVEN:]))
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
