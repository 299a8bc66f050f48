"""``memckpt simulate``: failures of a cluster, and what is left of a training's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memckpt.cli.common import AsJson, count, out, plain_table, print_json, seconds_text
from memckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from memckpt_tools.planning.job import Job
    from memckpt_tools.planning.scheme import Scheme, Tier
    from memckpt_tools.simulation.failures import FailureModel, Failures
    from memckpt_tools.simulation.run import Estimate, Setup, Summary, Sweep

_cluster, _fails, _repair, _protection, _run = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Cluster", "Failures", "Repair", "Protection", "Simulation")
)

_SWEEPS = ("sweep_mtbf_hours", "sweep_nodes")
_MARKERS = "osv^Dx*"


def simulate(
    context: typer.Context,
    nodes: Annotated[int | None, _cluster(help="Nodes of the job. Default: those of a plan in --schemes.")] = None,
    step_seconds: Annotated[
        float | None, _run(help="Time of a step without protection. Default: that of a plan in --schemes.")
    ] = None,
    nodes_per_rack: Annotated[int | None, _cluster(help="Nodes in a rack.")] = None,
    racks_per_zone: Annotated[int | None, _cluster(help="Racks in a zone.")] = None,
    node_mtbf_hours: Annotated[
        float | None, _fails(help="Mean time between failures of one node, by hardware and software.")
    ] = None,
    job_mtbf_hours: Annotated[
        float | None, _fails(help="The same of all nodes together, in place of --node-mtbf-hours.")
    ] = None,
    software_share: Annotated[
        float | None, _fails(help="Share of software among failures of nodes, 0 to 1: processes die, memory stays.")
    ] = None,
    weibull_shape: Annotated[
        float, _fails(help="Shape of the times between failures of hardware; 1: exponential.")
    ] = 1.0,
    new_nodes: Annotated[
        bool, _fails("--new-nodes", help="Nodes are new when training starts, not long in service.")
    ] = False,
    rack_mtbf_hours: Annotated[
        float | None, _fails(help="Mean time between failures of a rack, with all its nodes.")
    ] = None,
    zone_mtbf_hours: Annotated[
        float | None, _fails(help="Mean time between failures of a zone, with all its nodes.")
    ] = None,
    cluster_mtbf_hours: Annotated[float | None, _fails(help="Mean time between failures of all nodes at once.")] = None,
    trace: Annotated[
        Path | None,
        _fails(help="Failures from a file in place of distributions: CSV with columns time_seconds, kind, node."),
    ] = None,
    detection_seconds: Annotated[
        float | None, _repair(help="From a failure until the job's processes have ended.")
    ] = None,
    replacement_seconds: Annotated[
        float | None, _repair(help="From then until a spare node has a lost one's place.")
    ] = None,
    repair_seconds: Annotated[
        float, _repair(help="From a failure until a lost node can serve as a spare; with --spares.")
    ] = 0.0,
    spares: Annotated[int | None, _repair(help="Spare nodes. Default: enough.")] = None,
    start_seconds: Annotated[
        float, _repair(help="From the start of processes to the first step, where nothing is held.")
    ] = 0.0,
    schemes: Annotated[
        Path | None,
        _protection(
            help="Schemes of protection, as YAML or JSON. A file of memckpt plan also gives nodes, the time of a step, "
            "failures and times of restarts, where options do not; a sweep plans anew at each point."
        ),
    ] = None,
    only: Annotated[list[str] | None, _protection(help="Name of a scheme of --schemes, to leave out others.")] = None,
    tier: Annotated[
        list[str] | None,
        _protection(
            help="A tier of a scheme, nearest first: name=disk,every_steps=100,... Fields: name, every_steps, "
            "lag_steps, restore_seconds, group_nodes, tolerates, survives_cluster (true or false), rebuild_seconds.",
            metavar="FIELD=VALUE,...",
        ),
    ] = None,
    overhead: Annotated[
        float, _protection(help="Of the scheme of --tier: time that it adds to a step, as a share.")
    ] = 0.0,
    name: Annotated[str, _protection(help="Name of the scheme of --tier.")] = "options",
    days: Annotated[float, _run(help="Days from start to end, failures included.")] = 90.0,
    repetitions: Annotated[int, _run(help="Independent repetitions.")] = 20,
    seed: Annotated[int, _run(help="Seed of all draws.")] = 0,
    workers: Annotated[int, _run(help="Processes that share the repetitions; results are the same.")] = 1,
    confidence: Annotated[float, _run(help="Confidence of the intervals.")] = 0.95,
    plot: Annotated[
        Path | None,
        _run(
            help="Draw ETTR against time between failures and number of nodes, both from a quarter to four times: "
            "a .png, .svg or .pdf. Takes about 16 times as long."
        ),
    ] = None,
    sweep_mtbf_hours: Annotated[
        str | None, _run(help="With --plot: these times between failures of the job, such as 0.1,1,5.")
    ] = None,
    sweep_nodes: Annotated[str | None, _run(help="With --plot: these numbers of nodes, such as 2,4,8.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate the failures of a cluster, and what is left of a training's time under schemes of protection.

    Failures are drawn, or read with --trace; all schemes get the same. For each scheme: the share of useful training
    time (ETTR), lost steps, time without training, and the tiers that recoveries came from, as means of the repetitions
    with confidence intervals.
    """
    from memckpt_tools.planning.pictures import check_plot
    from memckpt_tools.planning.values import fields_as_options, option_of
    from memckpt_tools.simulation.failures import Cluster, read_trace
    from memckpt_tools.simulation.replay import Repair, Training
    from memckpt_tools.simulation.run import Setup
    from memckpt_tools.simulation.run import simulate as run_schemes

    if plot is not None:
        check_plot(plot)
    if repair_seconds and spares is None:
        raise ConfigurationError(
            f"--repair-seconds {repair_seconds:g}: expected --spares with it, found none; without --spares there are "
            "enough spare nodes, and no repair is waited for"
        )
    axes = (_numbers("--sweep-mtbf-hours", sweep_mtbf_hours), _numbers("--sweep-nodes", sweep_nodes))
    if any(axes) and plot is None:
        raise ConfigurationError("--sweep-mtbf-hours, --sweep-nodes: expected --plot with it, found none")
    protection, job = _schemes_of(schemes, only, tier, overhead, name)
    given = {name: value for name, value in context.params.items() if value is not None}
    if job is not None:
        given = options_of(job, given) | given
    for each in ("nodes", "step_seconds"):
        if each not in given:
            raise ConfigurationError(f"{option_of(each)}: expected it, or a plan in --schemes, found neither")
    run = partial(run_schemes, repetitions=repetitions, seed=seed, workers=workers, confidence=confidence)
    options = {name: option_of(name) for name in context.params}
    with fields_as_options(options | {"racks": "--rack-mtbf-hours", "zones": "--zone-mtbf-hours"}):
        cluster = Cluster(
            nodes=given["nodes"], nodes_per_rack=given.get("nodes_per_rack"), racks_per_zone=racks_per_zone
        )
        failures: FailureModel | Failures
        hours = {name: value for name, value in given.items() if name.endswith("_mtbf_hours") and name not in _SWEEPS}
        if trace is not None:
            if found := [*hours, *(["plot"] if plot is not None else [])]:
                drawn = ", ".join(map(option_of, found))
                raise ConfigurationError(f"--trace {trace}: expected no {drawn} with it, found both")
            failures = read_trace(trace, cluster)
        else:
            means = {
                name.removesuffix("_mtbf_hours"): _seconds(option_of(name), value, 3600)
                for name, value in hours.items()
            }
            failures = _model_of(cluster.nodes, means, given.get("software_share", 0.0), weibull_shape, new_nodes)
        setup = Setup(
            cluster=cluster,
            failures=failures,
            training=Training(step_seconds=given["step_seconds"], duration_seconds=_seconds("--days", days, 86400)),
            repair=Repair(
                detection_seconds=given.get("detection_seconds", 0.0),
                replacement_seconds=given.get("replacement_seconds", 0.0),
                repair_seconds=repair_seconds,
                spares=spares,
                start_seconds=start_seconds,
            ),
        )
        summaries = run(setup, protection)
        swept = None
        if plot is not None:
            from memckpt_tools.simulation.run import sweep

            at = partial(planned_schemes, job, protection)
            swept = sweep(setup, at, run, [hour * 3600 for hour in axes[0]], [round(number) for number in axes[1]])
            draw(swept, plot, f"{count(cluster.nodes, 'node')}; {days:g} days")
    if as_json:
        print_json(_as_json(setup, summaries, seed, swept))
        return
    _show(setup, summaries, seed)
    if plot is not None:
        out.print(f"drawn: {plot}", markup=False, soft_wrap=True)


def _seconds(option: str, value: float, unit_seconds: float) -> float:
    """A time of an option in seconds; what is wrong is said in the option's unit."""
    from memckpt_tools.planning.values import require_range
    from memckpt_tools.simulation.failures import LongTime

    require_range(option, value, LongTime, unit_seconds, "days" if unit_seconds == 86400 else "hours")
    return value * unit_seconds


def _numbers(option: str, text: str | None) -> list[float]:
    """Read numbers above 0, separated by commas."""
    found = []
    for part in (text or "").split(",") if text is not None else ():
        try:
            found.append(float(part))
        except ValueError:
            found.append(0.0)
        if not 0 < found[-1] < 1e6:
            raise ConfigurationError(f"{option}: expected numbers above 0, such as 1,2,4, found {text!r}")
    return found


def _schemes_of(
    path: Path | None, only: list[str] | None, tiers: list[str] | None, overhead: float, name: str
) -> tuple[list[Scheme], Job | None]:
    from memckpt_tools.planning.scheme import Scheme

    schemes, job = ([], None) if path is None else read_schemes(path)
    if unknown := set(only or ()) - {one.name for one in schemes}:
        names = ", ".join(one.name for one in schemes) or "none: --schemes is missing"
        raise ConfigurationError(f"--only {sorted(unknown)[0]}: expected one of {names}")
    if only:
        schemes = [one for one in schemes if one.name in only]
    if tiers:
        schemes.append(Scheme(name=name, overhead=overhead, tiers=tuple(map(parse_tier, tiers))))
    elif overhead:
        raise ConfigurationError(f"--overhead {overhead:g}: expected --tier beside it, whose scheme it belongs to")
    if not schemes:
        raise ConfigurationError("schemes: expected --schemes FILE or --tier, found neither")
    return schemes, job


def read_schemes(path: Path) -> tuple[list[Scheme], Job | None]:
    """Read schemes from a file of JSON (``.json``) or YAML: a list, or a mapping with the list as ``schemes``.

    ``memckpt plan --schemes`` adds the job that they were planned for, as ``job``.
    """
    from memckpt_tools.planning.job import Job
    from memckpt_tools.planning.scheme import Scheme
    from memckpt_tools.planning.values import converted, read_tree

    found, job = read_tree(path, f"--schemes {path}"), None
    if isinstance(found, Mapping) and "schemes" in found and set(found) <= {"job", "schemes"}:
        job = converted(found["job"], Job, f"{path}: job") if "job" in found else None
        found = found["schemes"]
    if not isinstance(found, list) or not found:
        raise ConfigurationError(f"{path}: expected a list of schemes, found {found!r}")
    return converted(found, list[Scheme], f"{path}: schemes"), job


def options_of(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Say with options what a planned job says. Its failures are left out where any of others are given."""
    failures = job.failures
    found: dict[str, Any] = {
        "nodes": job.nodes,
        "step_seconds": job.step_seconds,
        "detection_seconds": job.restart_seconds,
        "replacement_seconds": job.replacement_seconds,
    }
    if "trace" in given or any(name.endswith("_mtbf_hours") and name not in _SWEEPS for name in given):
        return found
    if of_nodes := failures.process + failures.node:
        found |= {"job_mtbf_hours": 1 / of_nodes / 3600, "software_share": failures.process / of_nodes}
    if failures.domain:
        found |= {"rack_mtbf_hours": job.domains / failures.domain / 3600}
        found |= {"nodes_per_rack": -(-job.nodes // job.domains)}
    if failures.cluster:
        found |= {"cluster_mtbf_hours": 1 / failures.cluster / 3600}
    return found


def planned_schemes(job: Job | None, schemes: Sequence[Scheme], mtbf_seconds: float, nodes: int) -> list[Scheme]:
    """Plan a job anew with other failures and nodes: schemes of the same names, without those that it cannot have.

    Schemes that are no plan's stay as they are, and all of them without a job.
    """
    from dataclasses import replace

    from memckpt_tools.planning.papers import PAPERS
    from memckpt_tools.planning.schemes import make_plan

    if job is None:
        return list(schemes)
    replicas = nodes if job.replicas == job.nodes else job.replicas
    other = replace(job, mtbf_seconds=mtbf_seconds, nodes=nodes, replicas=replicas, domains=min(job.domains, nodes))
    rows = {row.scheme.name: row for row in make_plan(other, PAPERS).rows}
    return [
        rows[one.name].scheme if one.name in rows else one
        for one in schemes
        if one.name not in rows or not rows[one.name].refused
    ]


def parse_tier(text: str) -> Tier:
    """A tier from ``name=disk,every_steps=100,...``."""
    from memckpt_tools.planning.scheme import Tier
    from memckpt_tools.planning.values import converted

    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or name in values:
            raise ConfigurationError(f"--tier {text}: expected FIELD=VALUE, each field once, found {part.strip()!r}")
        values[name] = value
    return converted(values, Tier, f"--tier {text}: tier", strict=False)


def _model_of(nodes: int, means: Mapping[str, float], software_share: float, shape: float, new: bool) -> FailureModel:
    """Distributions of failures, from mean times between failures of a node, the job, a rack, a zone, the cluster."""
    from dataclasses import replace

    from memckpt_tools.simulation.failures import FailureModel, Lifetime

    if "node" in means and "job" in means:
        raise ConfigurationError("--node-mtbf-hours, --job-mtbf-hours: expected one of them, found both")
    if not means:
        raise ConfigurationError(
            "failures: expected --node-mtbf-hours, --job-mtbf-hours or --trace, found none of them"
        )
    model = FailureModel(new=new)
    if "node" in means or "job" in means:
        mean = means["node"] if "node" in means else means["job"] * nodes
        model = FailureModel.of_nodes(mean, software_share=software_share, shape=shape, new=new)
    racks, zones, cluster = (Lifetime(means[one]) if one in means else None for one in ("rack", "zone", "cluster"))
    return replace(model, racks=racks, zones=zones, cluster=cluster)


def _text(estimate: Estimate, form: str) -> str:
    mean = format(estimate.mean, form)
    return mean if estimate.half_width is None else f"{mean} ± {format(estimate.half_width, form)}"


def _show(setup: Setup, summaries: list[Summary], seed: int) -> None:
    first = summaries[0]
    repetitions = first.ettr.repetitions
    failures = {kind: estimate.mean for kind, estimate in first.failures.items() if estimate.mean}
    kinds = ", ".join(f"{kind} {mean:,.1f}" for kind, mean in failures.items())
    mean = f"{sum(failures.values()):,.1f} failures" + (f" ({kinds})" if kinds else "")
    how = (
        "one replay of a trace, or one repetition: no interval"
        if repetitions == 1
        else f"means of {count(repetitions, 'repetition')} with {first.confidence:.4g} confidence, seed {seed}"
    )
    head = f"{count(setup.cluster.nodes, 'node')}, {seconds_text(setup.training.duration_seconds)}, {mean}; {how}"
    out.print(head, markup=False, soft_wrap=True)
    table = plain_table("scheme", "ETTR", "steps lost", "time without training", "recoveries from")
    for summary in summaries:
        recoveries = [
            f"{tier}: {_text(each, ',.1f' if each.mean >= 1 else '.2f')}"
            for tier, each in summary.recoveries.items()
            if each.mean
        ]
        table.add_row(
            summary.scheme.name,
            _text(summary.ettr, ".4f"),
            _text(summary.lost_steps, ",.0f"),
            _text(summary.down_share, ".2%"),
            "\n".join(recoveries) or "-",
        )
    out.print(table)


def _as_json(setup: Setup, summaries: list[Summary], seed: int, swept: Sweep | None) -> dict[str, Any]:
    def of(estimate: Estimate) -> dict[str, float | None]:
        return {"mean": estimate.mean, "half_width": estimate.half_width}

    first = summaries[0]
    result: dict[str, Any] = {
        "nodes": setup.cluster.nodes,
        "duration_seconds": setup.training.duration_seconds,
        "repetitions": first.ettr.repetitions,
        "seed": seed,
        "confidence": first.confidence,
        "failures": {kind: of(estimate) for kind, estimate in first.failures.items()},
        "schemes": [
            {
                "name": summary.scheme.name,
                "ettr": of(summary.ettr),
                "lost_steps": of(summary.lost_steps),
                "down_share": of(summary.down_share),
                "recoveries": {tier: of(estimate) for tier, estimate in summary.recoveries.items()},
            }
            for summary in summaries
        ],
    }
    if swept is not None:
        result["by_mtbf"] = [
            {"mtbf_seconds": mtbf, "ettr": {each.scheme.name: of(each.ettr) for each in points}}
            for mtbf, points in swept.by_mtbf
        ]
        result["by_nodes"] = [
            {"nodes": nodes, "ettr": {each.scheme.name: of(each.ettr) for each in points}}
            for nodes, points in swept.by_nodes
        ]
    return result


def draw(sweep: Sweep, path: Path, title: str) -> None:
    """Draw a sweep: a line for each scheme, with its confidence interval as a band; `title` is of its left half."""
    from matplotlib.figure import Figure

    from memckpt_tools.planning.pictures import save_figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    found = [one for _, each in (*sweep.by_mtbf, *sweep.by_nodes) for one in each]
    names = list(dict.fromkeys(one.scheme.name for one in found))
    hours = [(mtbf / 3600, summaries) for mtbf, summaries in sweep.by_mtbf]
    sizes = [(float(nodes), summaries) for nodes, summaries in sweep.by_nodes]
    labels = ("mean time between failures of the job, hours", "nodes")
    for axes, label, points in zip((left, right), labels, (hours, sizes), strict=True):
        for at, name in enumerate(names):
            line = [(x, each.ettr) for x, summaries in points for each in summaries if each.scheme.name == name]
            _draw_line(axes, line, name, f"C{at % 10}", _MARKERS[at % len(_MARKERS)])
        axes.set_xscale("log")
        axes.set_xticks([x for x, _ in points], [f"{x:,.3g}" if x < 100 else f"{x:,.0f}" for x, _ in points])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("effective training time ratio")
    left.set_ylim(max(0.0, min(one.ettr.mean for one in found) - 0.03), 1.01)
    left.set_title(title, fontsize=10)
    right.set_title("each node fails as often as there", fontsize=10)
    right.legend(loc="lower left")
    save_figure(figure, path)


def _draw_line(axes: Any, points: Sequence[tuple[float, Estimate]], name: str, color: str, marker: str) -> None:
    xs, means = [x for x, _ in points], [ettr.mean for _, ettr in points]
    widths = [ettr.half_width or 0.0 for _, ettr in points]
    axes.plot(xs, means, color=color, marker=marker, markersize=4, label=name)
    low = [mean - width for mean, width in zip(means, widths, strict=True)]
    high = [mean + width for mean, width in zip(means, widths, strict=True)]
    axes.fill_between(xs, low, high, color=color, alpha=0.2)
