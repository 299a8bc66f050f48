"""Comparison of two runs by their lines: what differs, where first, and how far."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from memckpt_tools.drill.history import Point, RankHistory, RunHistory
from memckpt_tools.drill.lines import DIGEST_BYTES, SKETCHES, Key, Restored, Taken

#: Kinds of values that are what training computes. Others are what it goes by.
RESULTS = ("loss", "parameter", "state", "buffer", "frozen")
#: Kinds of values that are in no state.
PLAIN = ("attribute", "variable")
#: Kind of the difference that steps are missing.
STEPS = "steps"
#: Causes before effects, within one step.
_ORDER = (
    STEPS,
    "data position",
    "input",
    "loss",
    "buffer",
    "frozen",
    "parameter",
    "state",
    "hyperparameters",
    "absences",
    "generators",
    "registered",
    "logged values",
    *PLAIN,
)
#: Bytes of a tensor's sketch.
_SKETCH_BYTES = 8 * SKETCHES


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        rank: of the value.
        step, record: where it differs first.
        kind, name: what it is, such as ``"parameter"``, ``"head.weight"``.
        relative: distance as a fraction of the expected value, or of a tensor's norm; None where it is not known.
        text: the distance as text; may be empty.
        count: number of points at which it differs.
        restored: whether the first of them is a state right behind a restore.
    """

    rank: int
    step: int
    record: int
    kind: str
    name: str
    relative: float | None
    text: str
    count: int = 1
    restored: bool = False

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
    """The differences of a run from another one, one for each value that differs: the first ones first.

    Steps that a run leaves out, or adds, are a difference, too: a resume may have made its loop shorter, or longer.

    Args:
        found: a run, with any number of attempts.
        expected: a run of one attempt.
        last_record: records behind it are not compared.
        ignored: ranks and keys of values that are not compared.
        whole: whether the expected run ended with that record.
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
                first = new if known is None or point.record < known.record else known
                count = 1 if known is None else known.count + 1
                differences[key] = Difference(**{**vars(first), "count": count})
    for rank, history in found.ranks.items() if whole else ():
        if (rank, (STEPS, "")) in ignored:
            continue
        beyond = min((one for one in history.points() if one.record > last_record), key=_record, default=None)
        if beyond is not None:
            text = f"it trains on, where the undisturbed run had ended after {last_record}"
            new = Difference(rank, beyond.step, beyond.record, STEPS, "", None, text)
            differences[new.key] = new
    for rank, history in expected.ranks.items():
        missing = _missing(found.ranks.get(rank), history, last_record)
        if missing and (rank, (STEPS, "")) not in ignored:
            text = f"{len(missing)} of {last_record} are missing"
            new = Difference(rank, missing[0].step, missing[0].record, STEPS, "", None, text, len(missing))
            differences[new.key] = new
    return sorted(differences.values(), key=lambda each: (each.record, not each.restored, _order(each.kind), each.rank))


def _missing(found: RankHistory | None, expected: RankHistory, last_record: int) -> list[Point[Taken]]:
    """Steps of the expected run whose state the other one has never had."""
    there = set() if found is None else {point.record for point in found.points()}
    return [point for record, point in by_record(expected).items() if record <= last_record and record not in there]


def _record(point: Point[Taken] | Point[Restored]) -> int:
    return point.record


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
            yield (*key, relative, _far_text(relative))


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
            if kind in PLAIN and ours_text and theirs_text and ours_text[0] == theirs_text[0] == "=":
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


def _far_text(relative: float) -> str:
    if math.isinf(relative):
        return "by more than its norm"
    return f"by about {relative:.1g} of its norm" if relative else "by less than what a sketch of it shows"
