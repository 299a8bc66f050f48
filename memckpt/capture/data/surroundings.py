"""Iterators and loops that a script has put around a pass over a loader: some begin anew behind a resume."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import itertools
import operator
import textwrap
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

#: What may hold an iterator (`zip` holds a tuple of them), and how many of these are looked through.
_AROUND = (itertools.cycle, map, filter, zip, enumerate, itertools.chain, itertools.islice, itertools.starmap, tuple)
_DEEPEST = 6
_RANGE = type(iter(range(0)))


def may_cycle(frame: FrameType) -> bool:
    """Whether the code of a frame names ``itertools.cycle``: a look at all objects takes a while."""
    return any(name == "cycle" or frame.f_globals.get(name) is itertools.cycle for name in frame.f_code.co_names)


def is_in_cycle(iteration: Iterator[Any]) -> bool:
    """Whether ``itertools.cycle`` takes its batches, at once or through functions of Python."""
    return any(type(one) is itertools.cycle for one in _around(iteration))


def what_counts_anew(iteration: Iterator[Any], length: float) -> Literal["count", "bound"] | None:
    """What begins anew around a pass that goes on in its middle: a count of its batches, or a bound of their number.

    `length`: number of batches of a whole pass. A range beside it in ``zip`` bounds it as ``islice`` does.
    """
    found: Literal["count"] | None = None
    inside = [iteration]
    for one in _around(iteration):
        if type(one) is enumerate and _reduced(one)[1][1] == 0:
            found = "count"
        stops = [_stop_of(one)] if type(one) is itertools.islice else []
        if type(one) is tuple:
            place = next((number for number, each in enumerate(one) if any(each is known for known in inside)), 0)
            # Those before it have given their next number already.
            stops = [
                operator.length_hint(each) + (number < place) for number, each in enumerate(one) if type(each) is _RANGE
            ]
        if any(stop < length for stop in stops):
            return "bound"
        inside.append(one)
    return found


def counts_passes_anew(frame: FrameType | None) -> bool:
    """Whether the only loop around these calls is one over ``range(n)``, which nothing in it leaves early."""
    loops: list[ast.stmt] = []
    while frame is not None:
        with contextlib.suppress(OSError, SyntaxError):  # there is no source
            lines, first = ([], 0) if "-packages" in frame.f_code.co_filename else inspect.getsourcelines(frame)
            line, tree = frame.f_lineno - max(first, 1) + 1, ast.parse(textwrap.dedent("".join(lines)))
            inside = (each for each in ast.walk(tree) if isinstance(each, ast.For | ast.While))
            loops += [each for each in inside if each.body[0].lineno <= line <= (each.body[-1].end_lineno or 0)]
        frame = frame.f_back
    match loops:
        case [ast.For(iter=ast.Call(func=ast.Name("range"), args=[ast.Name() | ast.Constant() | ast.Attribute()]))]:
            return not any(isinstance(each, ast.Break | ast.Continue | ast.Return) for each in ast.walk(loops[0]))
    return False


def _around(iteration: Iterator[Any]) -> Iterator[Any]:
    """The iterators around an iteration, the inner ones first."""
    found: list[Any] = [iteration]
    for _ in range(_DEEPEST):
        found = [one for one in gc.get_referrers(*found) if type(one) in _AROUND]
        if not found:
            return
        yield from found


def _stop_of(cut: itertools.islice[Any]) -> float:
    """Number of batches that an ``islice`` gives before it ends; 0 where Python does not tell: it ends somewhere."""
    try:
        stop = _reduced(cut)[1][2]
    except TypeError:  # from Python 3.14 on
        return 0
    return float("inf") if stop is None else stop


def _reduced(iterator: Any) -> Any:
    """As pickle has it: the class, and what it is made from, with the count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return iterator.__reduce__()
