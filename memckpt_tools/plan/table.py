"""A plan as tables, JSON and a picture, and its configuration as YAML for Hydra and as Python."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape

from memckpt.cli.common import count, out, plain_table, print_json, seconds_text
from memckpt.config import CompressionConfig, MemckptConfig
from memckpt.config.settings import KIND, to_mapping, variant_name
from memckpt.errors import ConfigurationError
from memckpt.user_messages import nbytes_text, short_number
from memckpt_tools.planning.pictures import save_figure
from memckpt_tools.planning.scheme import Expectation, Failure, Planned
from memckpt_tools.planning.schemes import Plan

#: Two lines of each row: overhead and memory, then what failures of a process and of a node cost.
_COLUMNS = (
    "scheme", "ETTR", "overhead\nmemory\nof a node", "exact", "steps lost\nprocess\nnode", "next step\nprocess\nnode",
)  # fmt: skip
_SHOWN: tuple[Failure, ...] = ("process", "nodes")


def show(plan: Plan, notes: Sequence[str]) -> None:
    """Print a plan: the answer, what it is for, the schemes that do, why others do not, and the configuration."""
    best, job = plan.recommended, plan.job
    if best is None:
        out.print(plan.reason, style="bold yellow", markup=False, soft_wrap=True)
    else:
        name = f"{best.scheme.name}, {best.choice}"
        out.print(f"recommended: {name}: {plan.reason}", style="bold", markup=False, soft_wrap=True)
        out.print(_in_words(best), markup=False, soft_wrap=True)
    gpus = f" of {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
    out.print(
        f"\n{_count_text(job.parameters)} parameters on {count(job.nodes, 'node')}{gpus}, "
        f"a step of {job.step_seconds:g} s, a failure every {seconds_text(job.mtbf_seconds)}, "
        f"{job.software_share:.0%} of them of software",
        markup=False,
        soft_wrap=True,
    )
    table = plain_table(*_COLUMNS)
    for row in plan.rows:
        if row.fits and row.scheme.tiers:
            title = f"{escape(row.scheme.name)}\n[dim]{escape(row.choice)}[/]"
            table.add_row(title, *_cells(row), style="bold" if row is best else None)
    out.print(table)
    for row in plan.rows:
        if row.problems:
            said = f"not {row.scheme.name}: {'; '.join(row.problems)}"
            out.print(said, markup=False, soft_wrap=True, style="dim")
        elif row.notes:
            out.print(f"{row.scheme.name}: {'; '.join(row.notes)}", markup=False, soft_wrap=True, style="dim")
    for note in notes:
        out.print(note, markup=False, soft_wrap=True, style="dim")
    if best is not None and best.config is not None:
        out.print(f"\n# YAML, for Hydra\n{as_yaml(best.config)}", markup=False, soft_wrap=True)
        out.print(f"# Python\n{as_python(best.config)}", end="", markup=False, soft_wrap=True)


def _in_words(row: Planned) -> str:
    """Describe what a scheme takes beside its row in the table, and what is left where memory does not serve."""
    takes = f"  It takes at most {nbytes_text(row.memory.peak)} of a node's memory"
    if row.scheme.wire_bytes:
        takes += f", and {nbytes_text(row.scheme.wire_bytes)} of its network for each step"
    expected = row.expectation
    left = f"{_steps_text(expected, 'cluster')} steps lost, the next one in {_next_step_text(expected, 'cluster')}"
    return f"{takes}. Storage serves with a probability of {row.monthly_loss or 0:.2g} a month: {left}."


def _count_text(number: float) -> str:
    """A number of parameters, as models are named: 405B."""
    for magnitude, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= magnitude:
            return f"{number / magnitude:.4g}{name}"
    return f"{number:.0f}"


def _cells(row: Planned) -> list[str]:
    """Cells of a row behind its title, in the order of the columns."""
    expected = row.expectation
    return [
        f"{expected.ettr:.2%}",
        f"{row.scheme.overhead:.2%}\n{nbytes_text(row.memory.total) if row.memory.total else '-'}",
        "yes" if row.exact else "no",
        "\n".join(_steps_text(expected, kind) for kind in _SHOWN),
        "\n".join(_next_step_text(expected, kind) for kind in _SHOWN),
    ]


def _steps_text(expected: Expectation, kind: Failure) -> str:
    lost = expected.lost_steps[kind]
    text = f"{lost:.1f}" if lost < 100 else short_number(lost)
    return text if expected.tiers[kind] else f"all ({text})"


def _next_step_text(expected: Expectation, kind: Failure) -> str:
    seconds = expected.recovery_seconds[kind]
    return f"{seconds:,.0f} s" if 10 <= seconds < 10_000 else seconds_text(seconds)


def print_plan_json(plan: Plan, notes: Sequence[str]) -> None:
    """Print a plan as one object; all units are in the names of fields."""
    recommended = plan.recommended
    config = None if recommended is None else recommended.config
    print_json(
        {
            "job": plan.job,
            "notes": list(notes),
            "schemes": [_in_json(row) for row in plan.rows],
            "recommended": None if recommended is None else recommended.scheme.name,
            "reason": plan.reason,
            "config": None if config is None else settings_that_differ(config),
            "yaml": None if config is None else as_yaml(config),
            "python": None if config is None else as_python(config),
        }
    )


def write_schemes(plan: Plan, path: Path) -> None:
    """Write job and schemes as JSON, as `memckpt simulate` reads them. Raises ConfigurationError if that fails.

    What this job cannot have is left out: the simulator refuses groups of more nodes than there are.
    """
    found = msgspec.json.encode({"job": plan.job, "schemes": [row.scheme for row in plan.rows if not row.refused]})
    try:
        path.write_bytes(msgspec.json.format(found, indent=1) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"--schemes {path}: {error}") from error


def _in_json(row: Planned) -> dict[str, Any]:
    memory = dataclasses.asdict(row.memory) | {"total": row.memory.total, "peak": row.memory.peak}
    return {
        "scheme": row.scheme,
        "choice": row.choice,
        "memory_bytes_by_owner": memory,
        "ettr": row.expectation.ettr,
        "lost_steps": row.expectation.lost_steps,
        "recovery_seconds": row.expectation.recovery_seconds,
        "served_by": row.expectation.tiers,
        "monthly_loss_probability": row.monthly_loss,
        "two_nodes_survival_probability": row.survives_two,
        "exact": row.exact,
        "fits": row.fits,
        "problems": row.problems,
        "notes": row.notes,
    }


_GREY, _BLUE, _RED = "#8a8f98", "#2b6cb0", "#c05621"


def draw(plan: Plan, path: Path) -> None:
    """Draw time that does not advance training, steps lost with nodes, and memory, of each scheme."""
    from matplotlib.figure import Figure

    rows = [row for row in plan.rows if row.scheme.tiers]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    names = [row.scheme.name for row in rows]
    colors = [_BLUE if row is plan.recommended else _GREY if row.fits else _RED for row in rows]
    wasted, lost, memory = figure.subplots(1, 3, sharey=True)
    _bars(wasted, names, [100 * (1 - row.expectation.ettr) for row in rows], colors, "time that advances nothing, %")
    _bars(lost, names, [row.expectation.lost_steps["nodes"] for row in rows], colors, "steps lost with a node")
    _bars(memory, names, [row.memory.total / 2**30 for row in rows], colors, "memory of a node, GiB")
    wasted.invert_yaxis()
    job = plan.job
    figure.suptitle(
        f"{job.parameters / 1e9:.4g}B parameters, {job.nodes} nodes, a failure every {job.mtbf_seconds / 3600:.3g} h"
        f"{_legend(rows, plan)}",
        fontsize=11,
    )
    save_figure(figure, path)


def _legend(rows: list[Planned], plan: Plan) -> str:
    parts = ["blue: recommended"] if plan.recommended is not None else []
    parts += ["red: does not do for this job"] if not all(row.fits for row in rows) else []
    return f" ({'; '.join(parts)})" if parts else ""


def _bars(axes: Any, names: list[str], values: list[float], colors: list[str], title: str) -> None:
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
    axes.set_xlim(0, max([*values, 1e-9]) * 1.2)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def settings_that_differ(config: Any, default: Any = None) -> dict[str, Any]:
    """The nested mapping of the fields that differ from a default configuration; of a variant also its ``kind``.

    :func:`memckpt.config.settings.from_mapping` makes an equal configuration from it.
    """
    default = MemckptConfig() if default is None else default
    found: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value, usual = getattr(config, each.name), getattr(default, each.name)
        if value == usual:
            continue
        if not dataclasses.is_dataclass(value):
            found[each.name] = value
        elif type(value) is type(usual):
            found[each.name] = settings_that_differ(value, usual)
        else:
            kind: Any = type(value)
            name = variant_name(kind)
            tagged = to_mapping(config)[each.name].get(KIND) == name
            found[each.name] = {**({KIND: name} if tagged else {}), **settings_that_differ(value, kind())}
    return found


def as_yaml(config: MemckptConfig) -> str:
    """The configuration for a Hydra application: its defaults list, and the group ``memckpt``."""
    settings = settings_that_differ(config)
    lines = ["defaults:", "  - memckpt: default", "  - _self_"]
    if settings:
        lines += ["memckpt:", *_yaml_lines(settings, "  ")]
    return "\n".join(lines) + "\n"


def _yaml_lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float):
        digits, power, exponent = repr(value).partition("e")
        return f"{digits}{'' if '.' in digits else '.0'}{power}{exponent}"  # YAML 1.1 reads 1e9 as a text
    return str(value)


def as_python(config: MemckptConfig) -> str:
    """The configuration as Python: imports, and one assignment."""
    found: set[type] = set()
    call = _call(config, MemckptConfig(), found, "")
    own = sorted(kind.__name__ for kind in found if not issubclass(kind, CompressionConfig))
    compressors = sorted(kind.__name__ for kind in found if issubclass(kind, CompressionConfig))
    lines = [f"from memckpt import {', '.join(own)}"]
    if compressors:
        lines.append(f"from memckpt.compression import {', '.join(compressors)}")
    return "\n".join(lines) + f"\n\nconfig = {call}\n"


def _call(value: Any, default: Any, found: set[type], indent: str) -> str:
    """A call of a dataclass with the arguments that differ from the default's; notes the classes that it needs."""
    if not dataclasses.is_dataclass(value):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    kind: Any = type(value)
    found.add(kind)
    usual = default if type(default) is kind else kind()
    inner = indent + "    "
    arguments = [
        f"{inner}{each.name}={_call(getattr(value, each.name), getattr(usual, each.name), found, inner)},\n"
        for each in dataclasses.fields(kind)
        if getattr(value, each.name) != getattr(usual, each.name)
    ]
    return f"{kind.__name__}(" + ("\n" + "".join(arguments) + indent if arguments else "") + ")"
