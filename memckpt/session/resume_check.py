"""Verdict of a resume check, from the findings of all ranks, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from memckpt.recovery.comparison import Difference, Findings
from memckpt.session.witness import Testimony

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
#: Largest difference, relative to a tensor's largest value, that counts as rounding on an accelerator, by dtype.
_ROUNDING = {"float32": 1e-4, "float64": 1e-4}
_COARSE_ROUNDING = 2e-2
#: Kinds whose differences may be rounding.
_TENSORS = ("parameter", "state", "buffer", "frozen", "logged values")
#: Kinds that a verdict counts, with their plurals.
_COUNTED = {"parameter": "parameters", "state": "states", "buffer": "buffers", "frozen": "frozen tensors"}
_ORDER = (
    "data position",
    "generators",
    "hyperparameters",
    "absences",
    "registered",
    "logged values",
    "buffer",
    "frozen",
    "parameter",
    "state",
)
_CAUSES = (
    "the usual causes: plain attributes that are in no state_dict, a scheduler that is not registered, a loader that "
    "is not given to the session, data read from elsewhere, code that has changed, another batch size, an optimizer of "
    "your own that keeps something outside of its state"
)


@dataclass(frozen=True)
class Proof:
    """Comparison of a restored state with the sample that its record carries, of all ranks.

    Attributes:
        line: what was compared, or what differs, in words.
        differs: whether the state is another one; rounding on an accelerator does not count.
        rounds: whether it is the same but for rounding.
        broken: whether there is no whole state at all.
    """

    line: str
    differs: bool = False
    rounds: bool = False
    broken: bool = False

    @property
    def inexact(self) -> str:
        """Why the restored state is not exactly that of the record, in words; empty if it is."""
        return self.line if self.differs or self.rounds else ""


@dataclass
class ResumeCheck:
    """Result of the check of one resume; filled in once the first steps are over.

    Attributes:
        kind: configured check.
        evidence: what of the restored state was compared with the sample that its record carries, in words.
        refuted: whether the restored state is another one; then no step is compared.
        verdict: ``"pending"`` until the check is over. ``"equal"``: bit for bit. ``"rounding"``: equal but for the last
            bits, on an accelerator. ``"different"``: see `differences`. ``"none"``: there was nothing to compare with.
            ``"off"``: not configured.
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

    def settle(self, verdict: Verdict, line: str, differences: Sequence[Difference] = ()) -> None:
        """Set the verdict; where no step gave one, or the restored state is another one already, the sample's stays."""
        if self.evidence and (verdict == "none" or self.refuted):
            verdict = "different" if self.refuted else "equal"
            line = "; ".join(filter(None, (self.evidence, line)))
        self.verdict, self.line, self.differences = verdict, line, tuple(differences)


def prove(everybody: Sequence[Findings], accelerated: bool, step: int, tier: str) -> Proof:
    """Judge a restored state by the findings of all ranks.

    Args:
        everybody: findings, by rank.
        accelerated: whether some rank trains on an accelerator, whose kernels need not repeat their bits.
        step: step after which the sample was taken.
        tier: source of the state, in words.
    """
    wrong = [(rank, one) for rank, findings in enumerate(everybody) for one in findings.differences]
    what = f"a sample of the state after step {step}, from {tier}"
    if not wrong:
        return Proof(f"{what}: {_counts(everybody)} are equal, bit for bit")
    differences = [one for _, one in wrong]
    if accelerated and all(one.kind in _TENSORS and one.relative <= _allowed(one) for one in differences):
        worst = max(differences, key=lambda one: one.ulp)
        return Proof(f"{what}: equal but for rounding, by {worst.ulp:.3g} ulp at most, in {worst.name}", rounds=True)
    return Proof(f"{what} is {_differing(everybody, wrong)}", differs=True)


def judge(check: ResumeCheck, everybody: Sequence[Findings], accelerated: bool, what: str) -> None:
    """Set the verdict from the findings of all ranks.

    Args:
        check: gets the verdict.
        everybody: findings, by rank.
        accelerated: whether some rank trains on an accelerator, whose kernels need not repeat their bits.
        what: beginning of the line, like ``"step 113 was repeated"``.
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
    if accelerated and all(one.kind in _TENSORS and one.relative <= _allowed(one) for one in differences):
        worst = max(differences, key=lambda one: one.ulp)
        line = (
            f"{what}: {_counts(everybody)} are equal but for rounding; the largest difference is {worst.ulp:.3g} ulp, "
            f"in {worst.name}"
        )
        check.settle("rounding", line, differences)
        return
    check.settle("different", f"{what}: {_differing(everybody, wrong)}; {_CAUSES}", differences)


def judge_witness(check: ResumeCheck, everybody: Sequence[Testimony], accelerated: bool, step: int) -> None:
    """Set the verdict from the comparisons of gradients that a dead attempt had left.

    Ranks without a gradient to compare do not count, unless no rank has one.

    Args:
        check: gets the verdict.
        everybody: testimonies, by rank.
        accelerated: whether some rank trains on an accelerator, whose kernels need not repeat their bits.
        step: step that the gradients belong to.
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
    what = f"step {step}'s first {which} ({_size(sum(each.nbytes for each in everybody))}) {are}"
    left = f"{those} that the dead attempt had left"
    if not wrong:
        check.settle("equal", f"{what} {left}: equal, bit for bit")
        return
    differences = [one for _, _, one in wrong]
    if accelerated and all(one.relative <= _allowed(one) for one in differences):
        worst = max(differences, key=lambda one: one.ulp)
        line = f"{what} {left} but for rounding; the largest difference is {worst.ulp:.3g} ulp, in {worst.name}"
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


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def _allowed(one: Difference) -> float:
    if one.kind == "logged values":
        return _COARSE_ROUNDING
    if one.dtype == "float32" and torch.backends.cuda.matmul.allow_tf32:
        return _COARSE_ROUNDING
    return _ROUNDING.get(one.dtype, _COARSE_ROUNDING)


def _counts(everybody: Sequence[Findings]) -> str:
    """Numbers of compared tensors over all ranks, in words."""
    parts = []
    for kind, plural in _COUNTED.items():
        count = sum(one.compared.get(kind, 0) for one in everybody)
        if count:
            parts.append(f"{count} {kind if count == 1 and kind != 'frozen' else plural}")
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
