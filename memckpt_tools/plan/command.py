"""``memckpt plan``: settings for a job that is to come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memckpt.cli.common import AsJson, Node, directory_only, err
from memckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from memckpt_tools.planning.job import Job

_size, _cluster, _rates, _fails, _budgets, _out = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("The model", "The cluster", "Its rates", "Failures", "Budgets", "Output")
)
_GB, _GIB, _DAY = 1e9, 2.0**30, 86400.0
_MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
#: Bytes of an element, and tensors of a parameter's size that an optimizer keeps.
_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
_OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}
#: Options that are no field of a job themselves: the field, the option's unit, and its size in the field's unit.
_UNITS = {
    "network": ("network_bytes_per_second", "GB/s", _GB),
    "disk": ("disk_bytes_per_second", "GB/s", _GB),
    "copy": ("copy_bytes_per_second", "GB/s", _GB),
    "cpu_redo": ("agent_redo_parameters_per_second", "million parameters/s", 1e6),
    "mtbf_hours": ("mtbf_seconds", "hours", 3600.0),
    "node_mtbf_hours": ("mtbf_seconds", "hours", 3600.0),
    "run_days": ("run_seconds", "days", _DAY),
    "memory_budget": ("memory_budget_bytes", "GiB", _GIB),
}


def plan(
    context: typer.Context,
    parameters: Annotated[str | None, _size(help="Number of parameters: 7B, 405e9, 124439808.")] = None,
    model: Annotated[
        Path | None, _size(help="config.json of Hugging Face, or the same as YAML: counts parameters.")
    ] = None,
    run: Annotated[
        Path | None, _size("--run", help="A run directory with a live agent.", callback=directory_only)
    ] = None,
    node: Node = None,
    dtype: Annotated[str, _size(help="fp32, bf16 or fp16: of parameters and gradients.")] = "fp32",
    optimizer: Annotated[str, _size(help="adam, adamw, lion, momentum or sgd.")] = "adamw",
    gradient_bytes: Annotated[float | None, _size(help="In place of --dtype, per parameter.")] = None,
    state_bytes: Annotated[float | None, _size(help="In place of --dtype and --optimizer, per parameter.")] = None,
    nodes: Annotated[int | None, _cluster(help="Number of nodes. Default: 1.")] = None,
    gpus_per_node: Annotated[int | None, _cluster(help="Accelerators of a node; 0: CPUs. Default: 8.")] = None,
    replicas: Annotated[
        int | None, _cluster(help="Nodes that hold the same shards: 1 FSDP (default), all DDP.")
    ] = None,
    domains: Annotated[int | None, _cluster(help="Racks over which nodes are spread. Default: each its own.")] = None,
    step_seconds: Annotated[float | None, _rates(help="Seconds of a step without protection. Default: 1.")] = None,
    network: Annotated[float | None, _rates(help="GB/s that a node sends to peers. Default: 1.")] = None,
    disk: Annotated[float | None, _rates(help="GB/s of storage, all nodes together. Default: 2.")] = None,
    copy: Annotated[
        float | None, _rates(help="GB/s of a node into host memory. Default: 20 for each GPU; 4 without.")
    ] = None,
    copy_overlap: Annotated[
        float | None, _rates(help="Share of copying that costs no time. Default: 0.9; 0 without GPUs.")
    ] = None,
    cpu_redo: Annotated[
        float | None, _rates(help="Millions of parameters that a node's CPUs advance in a second. Default: 100.")
    ] = None,
    measure: Annotated[bool, _rates("--measure", help="Time this machine first: copy, redo, encode, disk.")] = False,
    directory: Annotated[Path | None, _rates(help="With --measure: where the disk is. Default: here.")] = None,
    link: Annotated[str | None, _rates(help="With --measure: HOST:PORT of a --listen, to time the link.")] = None,
    listen: Annotated[str | None, _rates(help="Serve one --link of another host at HOST:PORT, and end.")] = None,
    mtbf_hours: Annotated[float | None, _fails(help="Hours between two failures of the job. Default: 24.")] = None,
    node_mtbf_hours: Annotated[
        float | None, _fails(help="Hours between two failures of one node, in its place.")
    ] = None,
    software_share: Annotated[float | None, _fails(help="Share of failures of processes only. Default: 0.5.")] = None,
    domain_share: Annotated[float | None, _fails(help="Share of failures that take a rack. Default: 0.")] = None,
    cluster_share: Annotated[float | None, _fails(help="Share of failures that take all nodes. Default: 0.")] = None,
    restart_seconds: Annotated[
        float | None, _fails(help="Seconds from a failure until processes have started. Default: 120.")
    ] = None,
    replacement_seconds: Annotated[float | None, _fails(help="Seconds more, to replace a node. Default: 300.")] = None,
    run_days: Annotated[float | None, _fails(help="Length of the job, in days. Default: 30.")] = None,
    overhead_budget: Annotated[float | None, _budgets(help="Share of training time. Default: 0.03.")] = None,
    memory_budget: Annotated[float | None, _budgets(help="GiB of a node. Default: none.")] = None,
    loss_budget: Annotated[
        float | None, _budgets(help="Probability a month to lose more than memory holds. Default: 0.001.")
    ] = None,
    papers: Annotated[
        bool, _out("--papers", help="Also CheckFreq, Gemini, REFT, ECCheck, LowDiff and LowDiff+.")
    ] = False,
    schemes: Annotated[Path | None, _out(help="Write the schemes into this file (JSON), for memckpt simulate.")] = None,
    plot: Annotated[Path | None, _out(help="Draw the schemes into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ways to protect a training, and recommend a configuration.

    The size of the model comes from --parameters, --model or --run. What is given wins over what is measured, that
    over what a live run shows, that over defaults. Exit status 1 if no scheme keeps the budgets.
    """
    from memckpt_tools.plan import table as plan_table
    from memckpt_tools.planning.papers import PAPERS
    from memckpt_tools.planning.pictures import check_plot
    from memckpt_tools.planning.schemes import copies_in_words, make_plan
    from memckpt_tools.planning.values import fields_as_options, option_of

    if listen is not None:
        _serve_link(listen)
        return
    if (link is not None or directory is not None) and not measure:
        raise ConfigurationError(f"--{'link' if link else 'directory'}: expected it with --measure")
    if mtbf_hours is not None and node_mtbf_hours is not None:
        raise ConfigurationError("--node-mtbf-hours: expected it without --mtbf-hours, found both")
    if plot is not None:
        check_plot(plot)
    state, gradient = _bytes_per_parameter(dtype, optimizer)
    facts: dict[str, Any] = {
        "state_bytes": state if state_bytes is None else state_bytes,
        "gradient_bytes": gradient if gradient_bytes is None else gradient_bytes,
    }
    notes = [f"{facts['state_bytes']:g} bytes of state and {facts['gradient_bytes']:g} of gradient for each parameter"]
    if run is not None:
        from memckpt_tools.plan.measure import observe_run

        seen = observe_run(run, node, facts["state_bytes"])
        facts |= seen.facts
        notes += seen.notes
    if measure:
        from memckpt_tools.plan.measure import measure_machine

        measured = measure_machine(directory or Path.cwd(), link, err.print)
        facts |= measured.facts
        notes += measured.notes
    facts |= _given(context.params)
    if sized := _size_of(parameters, model):
        facts["parameters"] = sized[0]
        notes.append(sized[1])
    options = {name: option_of(name) for name in context.params}
    options |= {field: option_of(name) for name, (field, *_) in reversed(_UNITS.items())}
    with fields_as_options(options):
        found = make_plan(_job(facts, by_node=node_mtbf_hours is not None), PAPERS if papers else ())
    notes += filter(None, [copies_in_words(found.job, found.recommended)])
    if plot is not None:
        plan_table.draw(found, plot)
    if schemes is not None:
        if schemes.suffix != ".json":
            raise ConfigurationError(f"--schemes {schemes}: expected a name that ends in .json")
        plan_table.write_schemes(found, schemes)
    if as_json:
        plan_table.print_plan_json(found, notes)
    else:
        plan_table.show(found, notes)
        if plot is not None:
            err.print(f"drawn: {plot}", markup=False, soft_wrap=True)
    if found.recommended is None:
        raise typer.Exit(1)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job that options give, in the fields' units; what is wrong is said in the option's unit."""
    from memckpt.config.checks import hints_of
    from memckpt_tools.planning.job import Job
    from memckpt_tools.planning.values import option_of, require_range

    hints, given = hints_of(Job), {}
    for option, value in options.items():
        field, unit, size = _UNITS.get(option, (option, "", 1.0))
        if value is None or field not in hints or option == "parameters":
            continue
        if unit:
            require_range(option_of(option), value, hints[field], size, unit)
        given[field] = value * size if unit else value
    return given


def _job(facts: Mapping[str, Any], *, by_node: bool) -> Job:
    """The job of what is known; the rest are defaults. `by_node`: the time between failures is that of one node."""
    from memckpt_tools.planning.job import Job

    if "parameters" not in facts:
        raise ConfigurationError("expected --parameters, --model or --run for the size of the model, found none")
    settings: dict[str, Any] = {"nodes": 1, "step_seconds": 1.0, "mtbf_seconds": _DAY, **facts}
    gpus = settings.get("gpus_per_node", Job.gpus_per_node)
    if gpus >= 0:
        settings.setdefault("copy_bytes_per_second", 20 * _GB * gpus if gpus else 4 * _GB)
        settings.setdefault("copy_overlap", Job.copy_overlap if gpus else 0.0)
        rate = Job.redo_parameters_per_second * gpus if gpus else Job.agent_redo_parameters_per_second
        settings.setdefault("redo_parameters_per_second", rate)
    if by_node:  # the failure of any node ends the job: REFT, appendix A, equation 6
        settings["mtbf_seconds"] /= max(1, settings["nodes"])
    return Job(**settings)


def _bytes_per_parameter(dtype: str, optimizer: str) -> tuple[float, float]:
    """Bytes of state and of gradient for each parameter."""
    for option, value, known in (("--dtype", dtype, _DTYPES), ("--optimizer", optimizer, _OPTIMIZERS)):
        if value not in known:
            raise ConfigurationError(f"{option}: expected one of {', '.join(known)}, found {value!r}")
    size = _DTYPES[dtype]
    return size * (1.0 + _OPTIMIZERS[optimizer]), float(size)


def parse_count(text: str) -> float:
    """A number with an optional magnitude: ``7B``, ``1.5T``, ``405e9``."""
    plain = text.strip().replace(",", "").replace("_", "")
    found = re.fullmatch(r"((?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+]?[0-9]+)?)([KMBGTkmbgt]?)", plain)
    if found:
        return float(found[1]) * _MAGNITUDES[found[2].upper()]
    raise ConfigurationError(f"--parameters: expected a number such as 7B, 405e9 or 124439808, found {text!r}")


def _size_of(parameters: str | None, model: Path | None) -> tuple[float, str] | None:
    """Number of parameters, and where it comes from."""
    if parameters is not None and model is not None:
        raise ConfigurationError("--model: expected it without --parameters, found both")
    if parameters is not None:
        return parse_count(parameters), f"{parameters} parameters, as given"
    if model is None:
        return None
    from memckpt_tools.planning.job import count_parameters
    from memckpt_tools.planning.values import read_tree

    found = read_tree(model, f"--model {model}")
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"--model {model}: expected a mapping of settings, found a {type(found).__name__}")
    size = count_parameters(found)
    return float(size.parameters), f"{size.parameters:,} parameters by {model}: {size.how}"


def _serve_link(address: str) -> None:
    from memckpt_tools.plan.measure import parse_address, serve

    host, port = parse_address("--listen", address)
    received, seconds = serve(host, port, lambda place: err.print(f"listening at {place}", markup=False))
    err.print(
        f"{received / 1e9:.2f} GB in {seconds:.1f} s: {received / max(seconds, 1e-9) / 1e9:.2f} GB/s", markup=False
    )
