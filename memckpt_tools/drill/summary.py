"""Summaries of both kinds of drill: rows of one table, test cases for CI, findings for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from memckpt.cli.common import out, seconds_text
from memckpt_tools.drill import stock, supervisor
from memckpt_tools.drill.text import (
    as_json,
    divergence,
    printable,
    stock_json,
    stock_verdict_text,
    table_of,
    verdict_text,
)


@dataclass(frozen=True)
class Case:
    """One kill, or the whole of a training, as a test."""

    name: str
    seconds: float
    problem: str = ""  #: empty: it has passed


@dataclass(frozen=True)
class Summary:
    """What one way of resuming has come to."""

    way: str
    outcome: str  #: exact, within, diverged, cannot start
    cases: list[Case]
    lost: list[int]  #: steps that are trained again, by kill of a trainer
    seconds: list[float]  #: from its signal to the first new step, where there was one
    step_seconds: float  #: median of a step
    findings: dict[str, Any]  #: of plain types
    repros: Mapping[str, str] = field(default_factory=dict)  #: scripts that show its failures again, by name

    @property
    def passed(self) -> bool:
        return self.outcome in ("exact", "within")


def summary_of_own(result: stock.Result, command: Sequence[str], seed: int) -> Summary:
    """Summary of a drill of a script's own checkpoints."""
    cases = [
        Case(
            f"kill {number}: {blow.kind} behind step {blow.step}",
            blow.seconds,
            blow.why_none
            or ("" if blow.difference is None or result.outcome == "within" else divergence(blow.difference)),
        )
        for number, blow in enumerate(result.blows, start=1)
    ]
    passed = result.outcome in ("exact", "within")
    cases.append(Case("training", 0.0, "" if passed else stock_verdict_text(result).plain))
    began = [blow for blow in result.blows if blow.resumed is not None]
    return Summary(
        "its own",
        result.outcome,
        cases,
        [blow.lost for blow in began],
        [blow.seconds for blow in began],
        result.step_seconds,
        stock_json(result, command, seed),
    )


def summary_of_protected(result: supervisor.Result, command: Sequence[str], seed: int) -> Summary:
    """Summary of a drill of a training that memckpt protects."""
    outcome = {"equal": "exact", "different": "diverged"}.get(result.verdict.outcome, result.verdict.outcome)
    cases = [
        Case(
            f"kill {number}: {blow.kind} behind step {blow.step}",
            blow.seconds,
            blow.check_line if blow.check == "different" else "",
        )
        for number, blow in enumerate(result.blows, start=1)
    ]
    cases.append(Case("training", 0.0, verdict_text(result).plain if outcome == "diverged" else ""))
    deadly = [blow for blow in result.blows if blow.kind != "agent"]
    return Summary(
        "memckpt",
        outcome,
        cases,
        [blow.lost for blow in deadly],
        [blow.seconds for blow in deadly],
        result.step_seconds[supervisor.FIRST],
        as_json(result, command, seed),
    )


def print_beside(summaries: Sequence[Summary]) -> None:
    """Print a row for each way of resuming the same script."""
    numbers = ("kills>", "steps lost\na kill>", "at\nmost>", "until\nnew step>", "a step\ntakes>")
    table = table_of("checkpoints", "training\ngoes on", *numbers)
    for each in summaries:
        seconds = seconds_text(statistics.mean(each.seconds)) if each.seconds else "-"
        lost = (f"{statistics.mean(each.lost):.1f}", str(max(each.lost))) if each.lost else ("-", "-")
        kills, step = str(len(each.cases) - 1), f"{1e3 * each.step_seconds:.1f} ms"
        table.add_row(each.way, each.outcome, kills, *lost, seconds, step)
    out.print(table)


def junit_xml(summaries: Sequence[Summary]) -> bytes:
    """A suite of test cases for each way, as CI systems read it."""
    suites = ElementTree.Element("testsuites", name="memckpt drill")
    for each in summaries:
        failures = sum(bool(case.problem) for case in each.cases)
        counts = {"tests": str(len(each.cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
        suite = ElementTree.SubElement(suites, "testsuite", {"name": each.way, **counts})
        for case in each.cases:
            test = ElementTree.SubElement(
                suite, "testcase", classname=f"drill.{each.way}", name=case.name, time=f"{case.seconds:.3f}"
            )
            if case.problem:
                problem = printable(case.problem)
                ElementTree.SubElement(test, "failure", message=problem.partition("\n")[0]).text = problem
    ElementTree.indent(suites)
    content: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"
