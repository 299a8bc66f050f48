"""Runs of a drill compared: where they differ, how far, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from memckpt_tools.drill.lines import (
    ATTRIBUTE,
    DIGEST_BYTES,
    SKETCHES,
    TEXT,
    VARIABLE,
    Key,
    Point,
    RankHistory,
    Restored,
    RunHistory,
    Taken,
)

#: Kinds of values that are what training computes. Others are what it goes by.
RESULTS = ("loss", "parameter", "state", "buffer", "frozen")
#: Kinds of values that are in no state.
PLAIN = (ATTRIBUTE, VARIABLE)
#: Kind of the difference that steps are missing.
STEPS = "steps"
#: Causes before effects, within one step.
_ORDER = (
    STEPS, "data position", "input", "loss", "hyperparameters", "buffer", "frozen", "parameter", "state", "absences",
    "generators", "registered", "logged values", *PLAIN,
)  # fmt: skip
_SKETCH_BYTES = 8 * SKETCHES


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs, first at a step."""

    rank: int
    step: int
    record: int
    kind: str  #: such as ``parameter``
    name: str  #: such as ``head.weight``
    relative: float | None  #: distance as a fraction of the expected value, or of a tensor's norm; None: not known
    text: str  #: the distance as text; may be empty
    count: int = 1  #: number of points at which it differs
    restored: bool = False  #: whether the first of them is a state right behind a restore

    @property
    def key(self) -> tuple[int, Key]:
        return self.rank, (self.kind, self.name)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}".strip()


def compare(
    found: RunHistory,
    expected: RunHistory,
    last_record: int,
    ignored: Collection[tuple[int, Key]] = (),
    whole: bool = False,
) -> list[Difference]:
    """The differences of a run from another one of a single attempt, one for each value: the first ones first.

    Steps that a run leaves out, or adds, are a difference, too: a resume may have made its loop shorter, or longer.
    Records behind `last_record` are not compared; `whole`: the expected run ended with it. Nor are `ignored` values.
    """
    differences: dict[tuple[int, Key], Difference] = {}
    for rank, history in found.ranks.items():
        reference = by_record(expected.ranks.get(rank))
        for point in history.points():
            other = reference.get(point.record)
            if other is None or point.record > last_record:
                continue
            for kind, name, relative, text in _differing(point, other):
                key = (rank, (kind, name))
                if key in ignored:
                    continue
                known = differences.get(key)
                restored = not isinstance(point.line, Taken)
                new = Difference(rank, point.step, point.record, kind, name, relative, text, 1, restored)
                earliest = new if known is None or point.record < known.record else known
                differences[key] = replace(earliest, count=1 if known is None else known.count + 1)
    lengths = []
    for rank, history in found.ranks.items() if whole else ():
        late = [one for one in history.points() if one.record > last_record]
        beyond = min(late, key=lambda point: point.record, default=None)
        if beyond is not None:
            text = f"it trains on, where the undisturbed run had ended after {last_record}"
            lengths.append(Difference(rank, beyond.step, beyond.record, STEPS, "", None, text))
    for rank, history in expected.ranks.items():
        if missing := _missing(found.ranks.get(rank), history, last_record):
            text = f"{len(missing)} of {last_record} are missing"
            first = missing[0]
            lengths.append(Difference(rank, first.step, first.record, STEPS, "", None, text, len(missing)))
    differences |= {one.key: one for one in lengths if one.key not in ignored}
    return sorted(differences.values(), key=lambda each: (each.record, not each.restored, _order(each.kind), each.rank))


def _missing(found: RankHistory | None, expected: RankHistory, last_record: int) -> list[Point[Taken]]:
    """Steps of the expected run whose state the other one has never had."""
    there = set() if found is None else {point.record for point in found.points()}
    return [point for record, point in by_record(expected).items() if record <= last_record and record not in there]


def _order(kind: str) -> int:
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def by_record(history: RankHistory | None) -> dict[int, Point[Taken]]:
    """The steps of a run that was not disturbed, by record."""
    if history is None:
        return {}
    return {point.record: point for attempt in history.attempts for point in attempt.points}


def _differing(
    found: Point[Taken] | Point[Restored], expected: Point[Taken]
) -> Iterator[tuple[str, str, float | None, str]]:
    """Kind, name, relative distance and text of each value that differs."""
    if isinstance(found.line, Taken):
        if found.line.losses != expected.line.losses:
            yield ("loss", "", *_losses_apart(found.line.losses, expected.line.losses))
        yield from _values_differing(found.line.values, expected.line.values)
    if found.keys == expected.keys and found.line.digests == expected.line.digests:
        return
    ours, theirs = _tensors(found), _tensors(expected)
    for key in dict.fromkeys([*theirs, *ours]):
        if key not in ours or key not in theirs:
            yield (*key, None, "it is there in one of the runs only")
        elif ours[key][0] != theirs[key][0]:
            relative = sketch_distance(ours[key][1], theirs[key][1])
            far = f"by about {relative:.1g} of its norm" if relative else "by less than what a sketch of it shows"
            yield (*key, relative, "by more than its norm" if math.isinf(relative) else far)


def _values_differing(
    ours: Mapping[str, Mapping[str, str]], theirs: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str, None, str]]:
    if ours == theirs:
        return
    for kind in dict.fromkeys([*theirs, *ours]):
        found, expected = ours.get(kind, {}), theirs.get(kind, {})
        for name in dict.fromkeys([*expected, *found]):
            ours_text, theirs_text = found.get(name), expected.get(name)
            if ours_text == theirs_text or (kind in PLAIN and None in (ours_text, theirs_text)):
                continue  # a variable that is not there yet is none that is wrong
            text = ""
            if ours_text and theirs_text and ours_text[0] == theirs_text[0] == TEXT:
                text = f"{ours_text[1:]} in place of {theirs_text[1:]}"
            yield kind, name, None, text


def _losses_apart(found: tuple[str, ...], expected: tuple[str, ...]) -> tuple[float | None, str]:
    if len(found) != len(expected):
        return None, f"{len(found)} backwards in place of {len(expected)}"
    ours, theirs = ([float.fromhex(each) for each in one] for one in (found, expected))
    worst = max(zip(ours, theirs, strict=True), key=lambda pair: _relative(*pair))
    relative = _relative(*worst)
    return relative, f"{worst[0]:.9g} in place of {worst[1]:.9g}"


def _relative(found: float, expected: float) -> float:
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(found) and math.isfinite(expected)) or expected == 0:
        return math.inf
    return abs(found - expected) / abs(expected)


def _tensors(point: Point[Taken] | Point[Restored]) -> dict[Key, tuple[bytes, bytes]]:
    """Digest and sketch of each tensor."""
    digests, sketches = point.line.digests, point.line.sketches
    return {
        key: (
            digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
            sketches[index * _SKETCH_BYTES : (index + 1) * _SKETCH_BYTES],
        )
        for index, key in enumerate(point.keys)
    }


def sketch_distance(found: bytes, expected: bytes) -> float:
    """Norm of the difference of two tensors, or sets of tensors, as a fraction of the norm of the expected one.

    An estimate: right within a factor of two as a rule. Infinite where a value is not finite.
    """
    ours, theirs = np.frombuffer(found), np.frombuffer(expected)
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return math.inf
    norm = float(np.sqrt(np.square(theirs).mean()))
    apart = float(np.sqrt(np.square(ours - theirs).mean()))
    return apart / norm if norm else math.inf


Outcome = Literal["equal", "within", "different"]
#: A killed run may be this many times as far from an undisturbed one as two undisturbed ones are from each other.
BAND_FACTOR = 3.0
#: Steps, at least, whose differences make the band.
_LEAST_RECORDS = 10


@dataclass(frozen=True)
class Band:
    """Distances of runs of a training that does not repeat itself, the largest of all steps."""

    loss: float  #: of two undisturbed runs, relative
    parameters: float  #: of these, as a fraction of the parameters' norm
    killed_loss: float  #: between the killed run and the nearer one of the two
    killed_parameters: float
    outside: int | None  #: the first step at which that is further away than :data:`BAND_FACTOR` allows; None: nowhere
    outside_text: str


@dataclass(frozen=True)
class Verdict:
    """What the three runs say.

    ``equal``: the killed run has the bits of an undisturbed one. ``within``: training does not repeat itself, and the
    killed run is as near as two undisturbed ones are. ``different``: it is not.
    """

    outcome: Outcome
    last_step: int
    last_record: int
    unrepeatable: list[Difference]  #: between the two undisturbed runs
    differences: list[Difference]  #: of the killed run from an undisturbed one, where these two agree
    holes: list[Difference]  #: plain attributes and variables that change, and that a resume has not put back
    loaders: tuple[str, ...]
    compared: dict[str, int]  #: number of values compared at each step, by kind
    band: Band | None  #: where training does not repeat itself; None where it does

    @property
    def repeats(self) -> bool:
        """Whether two undisturbed runs had the same results, bit for bit."""
        return self.band is None


def judge(first: RunHistory, second: RunHistory, killed: RunHistory, last_record: int, whole: bool = False) -> Verdict:
    """Compare two undisturbed runs, and a killed one with them, up to a record.

    `whole`: whether the first run ended there by itself, so that the killed one is to end there, too.
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
    return loss, sketch_distance(parameters_of(found)[1], parameters_of(expected)[1])


def parameters_of(point: Point[Taken] | Point[Restored]) -> tuple[bytes, bytes]:
    """The digests of all parameters, one behind the other, and their sketches."""
    found = [both for (kind, _), both in _tensors(point).items() if kind == "parameter"]
    return b"".join(digest for digest, _ in found), b"".join(sketch for _, sketch in found)


@dataclass(frozen=True)
class Overhead:
    """Median seconds of a step with protection, in each undisturbed run, and without (0: not known)."""

    protected: tuple[float, float]
    unprotected: float
    changed: Difference | None = (
        None  #: first result that is another one without protection, if training repeats itself
    )
    problem: str = ""  #: why it was not measured; empty if it was

    @property
    def share(self) -> float:
        """Mean of the protected runs beyond the unprotected one, as a fraction of it."""
        return sum(self.protected) / 2 / self.unprotected - 1

    @property
    def noise(self) -> float:
        """By how much the two protected runs differ, as a fraction of the unprotected one."""
        return abs(self.protected[0] - self.protected[1]) / self.unprotected


def first_change(unprotected: RunHistory, first: RunHistory, second: RunHistory, last_record: int) -> Difference | None:
    """The first result that differs without protection, and not between two protected runs."""
    ignored = {each.key for each in compare(second, first, last_record)}
    found = compare(unprotected, first, last_record, ignored)
    return next((each for each in found if each.kind in RESULTS), None)
