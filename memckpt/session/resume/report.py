"""Reports of a session to its user: the held state, the restore, the protection, and the verdict of its check."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from memckpt.errors import ForeignStateError
from memckpt.recovery.comparison import ComparedKind, Difference, Findings
from memckpt.state.layout import SNAPSHOTS, Layout
from memckpt.state.spec import StateSpec
from memckpt.state.tensors import allowed_rounding
from memckpt.user_messages import nbytes_text, short_number

_log = logging.getLogger("memckpt")
Verdict = Literal["pending", "equal", "rounding", "different", "none", "off"]
#: Values of the metric ``resume_check``.
VERDICT_VALUES: dict[Verdict, float] = {
    "pending": 0.0,
    "off": 0.0,
    "none": 0.0,
    "equal": 1.0,
    "rounding": 0.5,
    "different": -1.0,
}
#: The same for products of TF32 and for losses that a framework has rounded.
_COARSE_ROUNDING = 2e-2
#: Kinds whose differences may be rounding.
_TENSORS = ("parameter", "state", "buffer", "frozen", "logged values", "gradient")
#: Kinds that a verdict counts, with their plurals.
_COUNTED = {"parameter": "parameters", "state": "states", "buffer": "buffers", "frozen": "frozen tensors"}
#: Words for a resume by the verdict of its check, where nothing speaks against it.
_KNOWN = {"pending": "exact so far", "equal": "exact by what was compared", "rounding": "exact but for rounding"}
_ORDER = tuple(kind for kind in get_args(ComparedKind) if kind != "gradient")
_CAUSES = (
    "the usual causes: plain attributes that are in no state_dict, a scheduler or a generator of your own that is not "
    "registered, a loader that is not given to the session, data read from elsewhere, values written through .data, "
    "gradients kept from the step before, code that has changed, another batch size, an optimizer of your own that "
    "keeps something outside of its state"
)


@dataclass(frozen=True)
class HeldState:
    """The state that the plan has chosen, before it is restored.

    Attributes:
        step: the framework's step number.
        tier: its source: ``"local memory"``, ``"peers"``, ``"storage"``, or ``"resharding/ in the run directory"``.
        rank_state: values that this rank's captures returned at that step, by the names given to ``provide``. Where the
            number of ranks has changed, those of one of the former ranks.
        world_size: number of ranks of the run that wrote the state.
        newest_step: step that training continues behind: `step`, or the one after it, which is repeated first.
    """

    step: int
    record: int
    tier: str
    rank_state: Mapping[str, Any]
    world_size: int
    newest_step: int

    def provided_as(self, name: str, adapter: str, ranks: int | None = None) -> Any:
        """The value that an adapter has provided as `name`; `ranks`: it does for no other number of ranks.

        Raises:
            ForeignStateError: another adapter wrote the state, or another number of ranks.
        """
        if name not in self.rank_state:
            raise ForeignStateError(
                f"expected state written by {adapter}, found that of another training (it has "
                f'{sorted(self.rank_state)}); use another run_dir, or resume="never"'
            )
        if ranks not in (None, self.world_size):
            raise ForeignStateError(
                f"expected {self.world_size} ranks, as in the run that is continued, found {ranks}: the data position "
                'does not carry over to another number; start as many, or use resume="never"'
            )
        return self.rank_state[name]


@dataclass(repr=False)
class RestoreReport:
    """A completed restore; what the first steps show of it is added later.

    Attributes:
        step: the framework's step number of the restored state.
        record: number of its record.
        tier: source of the state, as in :class:`HeldState`.
        steps_lost: number of committed records beyond the restored one; None where no memory was left that knows.
        stated: why training does not go on exactly, in words, as far as the restore and the records show.
        check: verdict of the resume check, pending until the first steps are over.
        repeated: step that is repeated with ``resume_check="replay"``, behind `step`; None if no step is.
    """

    step: int
    record: int
    tier: str
    seconds: float
    steps_lost: int | None
    stated: tuple[str, ...] = ()
    check: ResumeCheck = field(default_factory=lambda: ResumeCheck("off", "off"))
    repeated: int | None = None

    @property
    def evidence(self) -> str:
        """What of the restored state was compared with the sample that its record carries, and how it came out."""
        return self.check.evidence

    @property
    def exact(self) -> bool:
        """Whether training goes on bit for bit; False also once the resume check has found a difference."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why training does not go on exactly, in words; empty if it does. A difference that the check finds is one."""
        line = self.check.line if self.check.verdict == "different" else ""
        return self.stated if not line or any(one in line for one in self.stated) else (*self.stated, line)

    def because(self, *reasons: str) -> RestoreReport:
        """Add further reasons, and log each cause once; empty ones are left out. Returns the report itself."""
        earlier: list[str] = []
        for reason in reasons:
            if reason and reason not in self.stated:
                known = any(reason.endswith(_cause(one)) for one in self.stated)  # also under its loader's name
                self.stated += (reason,)
                if not known and _cause(reason) != reason:
                    earlier.append(reason if not earlier else _cause(reason))
                elif not known:
                    _log.warning("memckpt: training does not go on exactly: %s", reason)
        if earlier:
            _log.warning("memckpt: training does not go on exactly: %s", "; ".join(earlier))
        return self

    def __str__(self) -> str:
        # A sentence for people; adapters log it.
        lost = f"{self.steps_lost} step{'' if self.steps_lost == 1 else 's'} lost"
        if self.steps_lost is None:
            lost = "later steps, if there were any, are repeated"
        step, proof = self.step, ""
        if self.repeated is not None:
            step, proof = self.repeated, f"; step {self.repeated} is repeated first, as a proof"
        known = _KNOWN.get(self.check.verdict, "exact as far as is known: no step was compared")
        if reasons := self.reasons:
            more = f" (and {len(reasons) - 1} more in report.reasons)" if len(reasons) > 1 else ""
            known = f"not exact: {reasons[0].partition(f'; {_CAUSES}')[0]}{more}"
        return f"resumed at step {step} from {self.tier} in {self.seconds:.2f} s, {lost}{proof}; {known}"

    def __repr__(self) -> str:
        # For a script's log: the check as its verdict, and no more digits than anybody reads.
        return (
            f"RestoreReport(step={self.step}, record={self.record}, tier={self.tier!r}, seconds={self.seconds:.3g}, "
            f"steps_lost={self.steps_lost}, exact={self.exact}, check={self.check.verdict!r}, repeated={self.repeated})"
        )


def _cause(reason: str) -> str:
    """The reason for which an earlier resume was not exact; any other reason as it is."""
    return reason.partition(": ")[2] if reason.startswith("an earlier resume") else reason


def describe_protection(spec: StateSpec, reason: str, tap: str, where: str, caveats: Sequence[str]) -> str:
    """One line about the protection of a run: parameters, mode and its reason, tap, memory, caveats."""
    layout = Layout(spec)
    whole = sum(math.prod(param.tensor.whole_shape) for param in spec.params)
    shards = "" if whole == layout.numel else f", of which this rank holds {short_number(layout.numel)}"
    if spec.mode == "snapshot":
        steps = "every step" if spec.every == 1 else f"one step of {spec.every}"
        how = f"snapshots ({reason}), {SNAPSHOTS} copies"
    else:
        steps = "every step"
        how = f"{spec.mode} redo ({reason}), tap: {tap}, T={spec.period}, D={spec.slots}"
    return (
        f"memckpt: protecting {steps} of {short_number(whole)} parameters{shards}: {how}, "
        f"{nbytes_text(layout.total_bytes)} {where}" + "".join(f"; note: {caveat}" for caveat in caveats)
    )


@dataclass(frozen=True)
class Proof:
    """Comparison of a restored state with the sample that its record carries, of all ranks, in words (`line`).

    `differs`: it is another state; `rounds`: the same but for rounding; `broken`: there is no whole state at all.
    """

    line: str
    differs: bool = False
    rounds: bool = False
    broken: bool = False


@dataclass
class ResumeCheck:
    """Result of the check of one resume; filled in once the first steps are over.

    Attributes:
        kind: configured check.
        evidence: what of the restored state was compared with the sample that its record carries, in words.
        refuted: whether the restored state is another one; then no step is compared.
        verdict: ``"pending"`` until the check is over. ``"equal"``: bit for bit. ``"rounding"``: equal but for the last
            bits, on an accelerator. ``"none"``: there was nothing to compare with. ``"off"``: not configured.
        line: verdict of all ranks in words.
        step: step that was compared; None while there is none.
        differences: first few differences of each kind, causes before effects.
    """

    kind: str
    verdict: Verdict = "pending"
    line: str = ""
    step: int | None = None
    differences: tuple[Difference, ...] = ()
    evidence: str = ""
    refuted: bool = False

    def prove(self, proof: Proof) -> None:
        """Take the comparison of the restored state with its sample; a difference is final."""
        self.evidence, self.refuted = proof.line, proof.differs
        if self.verdict == "none" or proof.differs:
            self.settle("none", self.line)

    def repeat_nothing(self, reason: str) -> None:
        """Repeat no step, for this reason, and say that none is compared."""
        self.step = None
        if self.verdict == "pending":
            self.settle("none", f"no step was compared: {reason}")

    def settle(self, verdict: Verdict, line: str, differences: Sequence[Difference] = ()) -> None:
        """Set the verdict; where no step gave one, or the restored state is another one already, the sample's stays."""
        if self.evidence and (verdict == "none" or self.refuted):
            verdict = "different" if self.refuted else "equal"
            more = "" if self.refuted else "other elements were not compared, as "
            line = f"{self.evidence}; {more}{line}" if line else self.evidence
        self.verdict, self.line, self.differences = verdict, line, tuple(differences)


def prove(everybody: Sequence[Findings], accelerated: bool, step: int, tier: str) -> Proof:
    """Judge a restored state by the findings of all ranks."""
    wrong = [(rank, one) for rank, findings in enumerate(everybody) for one in findings.differences]
    what = f"a sample of the state after step {step}, from {tier}"
    if not wrong:
        elements = sum(one.elements for one in everybody)
        return Proof(f"{what}: {elements:,} elements of {_counts(everybody)} are equal, bit for bit")
    if worst := _worst_rounding([one for _, one in wrong], accelerated):
        return Proof(f"{what}: equal but for rounding, by {_rounding(worst)} at most", rounds=True)
    return Proof(f"{what} is {_differing(everybody, wrong)}", differs=True)


def judge(check: ResumeCheck, everybody: Sequence[Findings], accelerated: bool, what: str) -> None:
    """Set the verdict from the findings of all ranks; `what` begins the line, like ``"step 113 was repeated"``.

    With an accelerator on some rank, differences may be rounding: its kernels need not repeat their bits.
    """
    found = [(rank, one) for rank, findings in enumerate(everybody) for one in findings.differences]
    wrong = sorted((pair for pair in found if pair[1].kind != "gradient"), key=lambda pair: _ORDER.index(pair[1].kind))
    problem = next((one.problem for one in everybody if one.problem), "")
    if problem and not wrong:
        check.settle("none", f"{what}, and could not be compared: {problem}")
        return
    if not wrong:
        check.settle("equal", f"{what}: {_counts(everybody)} are equal, bit for bit")
        return
    differences = [one for _, one in wrong]
    if worst := _worst_rounding(differences, accelerated):
        line = f"{what}: {_counts(everybody)} are equal but for rounding; they differ at most by {_rounding(worst)}"
        check.settle("rounding", line, differences)
        return
    check.settle("different", f"{what}: {_differing(everybody, wrong)}; {_CAUSES}", differences)


@dataclass
class Testimony:
    """Result of one rank, sent between ranks: counts, and the first few differences with their place in backward."""

    gradients: int = 0
    nbytes: int = 0
    differing: int = 0
    differences: list[tuple[int, Difference]] = field(default_factory=list)
    problem: str = ""


def judge_witness(check: ResumeCheck, everybody: Sequence[Testimony], accelerated: bool, step: int) -> None:
    """Set the verdict from the comparisons of gradients that a dead attempt had left.

    Ranks without a gradient to compare do not count, unless no rank has one.
    """
    count = sum(one.gradients for one in everybody)
    if not count:
        reason = next((one.problem for one in everybody if one.problem), "no gradient was made")
        check.settle("none", f"no step was compared: {reason}")
        return
    check.step = step
    wrong = sorted(
        ((order, rank, one) for rank, each in enumerate(everybody) for order, one in each.differences),
        key=lambda item: item[:2],
    )
    which, are, those = ("gradient", "is", "the one") if count == 1 else (f"{count} gradients", "are", "those")
    what = f"step {step}'s first {which} ({nbytes_text(sum(each.nbytes for each in everybody))}) {are}"
    left = f"{those} that the dead attempt had left"
    if not wrong:
        check.settle("equal", f"{what} {left}: equal, bit for bit")
        return
    differences = [one for _, _, one in wrong]
    if worst := _worst_rounding(differences, accelerated):
        line = f"{what} {left} but for rounding; they differ at most by {_rounding(worst)}"
        check.settle("rounding", line, differences)
        return
    _, rank, first = wrong[0]
    where = f" on rank {rank}" if len(everybody) > 1 else ""
    differing = sum(one.differing for one in everybody)
    more = f" ({differing} of {count} differ)" if count > 1 else ""
    line = (
        f"{what} not {left}: DIFFERENT: in backward's order first that of {first.name}{where}: {first.text}{more}; "
        f"{_CAUSES}"
    )
    check.settle("different", line, differences)


def _rounding(worst: Difference) -> str:
    return f"{worst.ulp:.3g} units in the last place, in {worst.name}"


def _worst_rounding(differences: Sequence[Difference], accelerated: bool) -> Difference | None:
    """The largest of these differences, if an accelerator's rounding explains all of them; None if it does not."""
    if not accelerated or any(one.kind not in _TENSORS or one.relative > _allowed(one) for one in differences):
        return None
    return max(differences, key=lambda one: one.ulp)


def _allowed(one: Difference) -> float:
    if one.kind == "logged values":
        return _COARSE_ROUNDING
    if one.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        return _COARSE_ROUNDING
    return allowed_rounding(one.dtype)


def _counts(everybody: Sequence[Findings]) -> str:
    """Numbers of compared tensors over all ranks, in words."""
    parts = []
    for kind, plural in _COUNTED.items():
        count = sum(one.compared.get(kind, 0) for one in everybody)
        if count:
            parts.append(f"{count} {plural[:-1] if count == 1 else plural}")
    for kind in ("generators", "data position"):
        if any(one.compared.get(kind) for one in everybody):
            parts.append(kind)
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _differing(everybody: Sequence[Findings], wrong: Sequence[tuple[int, Difference]]) -> str:
    """The first difference of each kind and the number of differences, in words."""
    parts = []
    for kind in _ORDER:
        of_kind = [(rank, one) for rank, one in wrong if one.kind == kind]
        if not of_kind:
            continue
        rank, first = of_kind[0]
        count = sum(one.differing.get(kind, 0) for one in everybody)
        total = sum(one.compared.get(kind, 0) for one in everybody)
        where = f" on rank {rank}" if len(everybody) > 1 else ""
        more = f" ({count} of {total} differ)" if total > 1 else ""
        label = "" if kind == "absences" else f"{kind} "
        parts.append(f"{label}{first.name}{where}: {first.text}{more}")
    gradients = [one for findings in everybody for one in findings.differences if one.kind == "gradient"]
    if gradients:
        parts.append(f"gradients already differ, first that of {gradients[0].name}: {gradients[0].text}")
    return "DIFFERENT: " + "; ".join(parts)
