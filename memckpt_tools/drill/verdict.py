"""The verdict of a drill: whether kills have left a trace in what was trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from memckpt_tools.drill.difference import PLAIN, RESULTS, STEPS, Difference, by_record, compare, sketch_distance
from memckpt_tools.drill.history import Point, RunHistory
from memckpt_tools.drill.lines import SKETCHES, Taken

Outcome = Literal["equal", "within", "different"]
#: A killed run may be this many times as far from an undisturbed one as two undisturbed ones are from each other.
BAND_FACTOR = 3.0
#: Steps, at least, whose differences make the band.
_LEAST_RECORDS = 10


@dataclass(frozen=True)
class Band:
    """Distances of runs of a training that does not repeat itself, the largest of all steps.

    Attributes:
        loss: largest relative difference of a loss between two undisturbed runs.
        parameters: largest distance of their parameters, as a fraction of the parameters' norm.
        killed_loss, killed_parameters: the same, between the killed run and the nearer one of the two.
        outside: the first step at which the killed run is further away than :data:`BAND_FACTOR` allows; None: nowhere.
        outside_text: what is outside there.
    """

    loss: float
    parameters: float
    killed_loss: float
    killed_parameters: float
    outside: int | None
    outside_text: str


@dataclass(frozen=True)
class Verdict:
    """What the three runs say.

    Attributes:
        outcome: ``"equal"``: the killed run has the bits of an undisturbed one. ``"within"``: training does not repeat
            itself, and the killed run is as near as two undisturbed ones are. ``"different"``: it is not.
        last_step, last_record: up to which steps were compared.
        unrepeatable: differences between the two undisturbed runs.
        differences: differences of the killed run from an undisturbed one, where these two agree.
        holes: plain attributes and variables that change in training, and that a resume has not put back.
        loaders: datasets of the DataLoaders, and their workers.
        compared: number of values compared at each step, by kind.
        band: where training does not repeat itself; None where it does.
    """

    outcome: Outcome
    last_step: int
    last_record: int
    unrepeatable: list[Difference]
    differences: list[Difference]
    holes: list[Difference]
    loaders: tuple[str, ...]
    compared: dict[str, int]
    band: Band | None

    @property
    def repeats(self) -> bool:
        """Whether two undisturbed runs had the same results, bit for bit."""
        return self.band is None


def judge(first: RunHistory, second: RunHistory, killed: RunHistory, last_record: int, whole: bool = False) -> Verdict:
    """Compare two undisturbed runs, and a killed one with them.

    Args:
        first, second: the undisturbed runs.
        killed: the killed run.
        last_record: the last record that is compared.
        whole: whether the first run ended there by itself, so that the killed one is to end there, too.
    """
    unrepeatable = compare(second, first, last_record)
    ignored = {each.key for each in unrepeatable}
    found = compare(killed, first, last_record, ignored, whole)
    differences = [each for each in found if each.kind not in PLAIN]
    holes = [each for each in found if each.kind in PLAIN and _changes(first, each)]
    band = None
    if any(each.kind in RESULTS for each in unrepeatable):
        band = _band(first, second, killed, last_record)
    outcome: Outcome = "equal"
    if any(each.kind == STEPS for each in differences) or (band is None and differences):
        outcome = "different"
    elif band is not None:
        outcome = "within" if band.outside is None else "different"
    point = max(by_record(first.ranks[0]).values(), key=lambda each: min(each.record, last_record))
    loaders, counts = first.ranks[0].loaders, _counts(point)
    return Verdict(outcome, point.step, last_record, unrepeatable, differences, holes, loaders, counts, band)


def _changes(run: RunHistory, value: Difference) -> bool:
    """Whether a value changes in the course of a run: what does not was set at the start, by the script."""
    points = by_record(run.ranks.get(value.rank)).values()
    found = (point.line.values.get(value.kind, {}).get(value.name) for point in points)
    return len({each for each in found if each is not None}) > 1


def _counts(point: Point[Taken]) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, _ in point.keys:
        found[kind] = found.get(kind, 0) + 1
    found["loss"] = len(point.line.losses)
    found |= {kind: len(values) for kind, values in point.line.values.items()}
    return found


def _band(first: RunHistory, second: RunHistory, killed: RunHistory, last_record: int) -> Band:
    """The distances of the three runs, step by step. What two undisturbed runs have reached by a step is the band.

    The first quarter of a run is one stretch, as are ten steps: a few differences say little about their spread.
    """
    least = min(last_record, max(_LEAST_RECORDS, last_record // 4))
    widest, furthest = [0.0, 0.0], [0.0, 0.0]
    outside: tuple[int, str] | None = None
    references = {rank: (by_record(history), by_record(second.ranks[rank])) for rank, history in first.ranks.items()}
    found: dict[int, list[tuple[int, Point[Taken]]]] = {}
    for rank, history in killed.ranks.items():
        for attempt in history.attempts:
            for point in attempt.points:
                found.setdefault(point.record, []).append((rank, point))
    for record in range(1, last_record + 1):
        for one in range(1, least + 1) if record == 1 else range(max(record, least), record + 1):
            for ours, theirs in references.values():
                if one in ours and one in theirs:
                    for index, distance in enumerate(_apart(theirs[one], ours[one])):
                        widest[index] = max(widest[index], distance)
        for rank, point in found.get(record, ()):
            near = [each[record] for each in references[rank] if record in each]
            if not near:
                continue
            far = [min(pair) for pair in zip(*(_apart(point, each) for each in near), strict=True)]
            for index, what in enumerate(("loss", "parameters")):
                furthest[index] = max(furthest[index], far[index])
                if outside is None and far[index] > BAND_FACTOR * widest[index]:
                    text = f"{what}: {far[index]:.2g} apart, where two undisturbed runs are {widest[index]:.2g} apart"
                    outside = point.step, text
    step, text = outside or (None, "")
    return Band(widest[0], widest[1], furthest[0], furthest[1], step, text)


def _apart(found: Point[Taken], expected: Point[Taken]) -> tuple[float, float]:
    """Relative distances of the losses, and of all parameters together."""
    ours, theirs = found.line.losses, expected.line.losses
    loss = 0.0 if len(ours) == len(theirs) else math.inf
    for one, other in zip(ours, theirs, strict=False):
        mine, yours = float.fromhex(one), float.fromhex(other)
        if not (math.isfinite(mine) and math.isfinite(yours)):
            loss = loss if one == other else math.inf
        elif mine != yours:
            loss = max(loss, abs(mine - yours) / max(abs(mine), abs(yours)))
    if found.keys != expected.keys:
        return loss, math.inf
    return loss, sketch_distance(_parameters(found), _parameters(expected))


def _parameters(point: Point[Taken]) -> bytes:
    """The sketches of all parameters, one behind the other."""
    size = 8 * SKETCHES
    return b"".join(
        point.line.sketches[index * size : (index + 1) * size]
        for index, (kind, _) in enumerate(point.keys)
        if kind == "parameter"
    )
