"""``memckpt plan``: settings for a job that is to come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memckpt.cli.common import AsJson, Node, directory_only, err
from memckpt.errors import ConfigurationError
from memckpt_tools.planning.mapping_file import read_tree

if TYPE_CHECKING:
    from memckpt_tools.planning.job import Job

_Size, _Cluster, _Rates, _Fails, _Budgets, _Out = (
    "The model", "The cluster", "Its rates", "Failures", "Budgets", "Output",
)  # fmt: skip

Parameters = Annotated[
    str | None, typer.Option(help="Number of parameters: 7B, 405e9, 124439808.", rich_help_panel=_Size)
]
Model = Annotated[
    Path | None,
    typer.Option(help="config.json of Hugging Face, or the same as YAML: counts parameters.", rich_help_panel=_Size),
]
LiveRun = Annotated[
    Path | None,
    typer.Option("--run", help="A run directory with a live agent.", callback=directory_only, rich_help_panel=_Size),
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16: of parameters and gradients.", rich_help_panel=_Size)]
Optimizer = Annotated[str, typer.Option(help="adam, adamw, lion, momentum or sgd.", rich_help_panel=_Size)]
GradientBytes = Annotated[float | None, typer.Option(help="In place of --dtype, per parameter.", rich_help_panel=_Size)]
StateBytes = Annotated[
    float | None, typer.Option(help="In place of --dtype and --optimizer, per parameter.", rich_help_panel=_Size)
]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes. Default: 1.", rich_help_panel=_Cluster)]
Gpus = Annotated[
    int | None, typer.Option(help="Accelerators of a node; 0: CPUs. Default: 8.", rich_help_panel=_Cluster)
]
Replicas = Annotated[
    int | None,
    typer.Option(help="Nodes that hold the same shards: 1 FSDP (default), all DDP.", rich_help_panel=_Cluster),
]
Domains = Annotated[
    int | None, typer.Option(help="Racks over which nodes are spread. Default: each its own.", rich_help_panel=_Cluster)
]
Network = Annotated[
    float | None, typer.Option(help="GB/s that a node sends to peers. Default: 1.", rich_help_panel=_Rates)
]
Disk = Annotated[
    float | None, typer.Option(help="GB/s of storage, all nodes together. Default: 2.", rich_help_panel=_Rates)
]
Copy = Annotated[
    float | None,
    typer.Option(help="GB/s of a node into host memory. Default: 20 for each GPU; 4 without.", rich_help_panel=_Rates),
]
CopyOverlap = Annotated[
    float | None,
    typer.Option(help="Share of copying that costs no time. Default: 0.9; 0 without GPUs.", rich_help_panel=_Rates),
]
StepSeconds = Annotated[
    float | None, typer.Option(help="Seconds of a step without protection. Default: 1.", rich_help_panel=_Rates)
]
MtbfHours = Annotated[
    float | None, typer.Option(help="Hours between two failures of the job. Default: 24.", rich_help_panel=_Fails)
]
NodeMtbfHours = Annotated[
    float | None, typer.Option(help="Hours between two failures of one node, in its place.", rich_help_panel=_Fails)
]
SoftwareShare = Annotated[
    float | None, typer.Option(help="Share of failures of processes only. Default: 0.5.", rich_help_panel=_Fails)
]
DomainShare = Annotated[
    float | None, typer.Option(help="Share of failures that take a rack. Default: 0.", rich_help_panel=_Fails)
]
ClusterShare = Annotated[
    float | None, typer.Option(help="Share of failures that take all nodes. Default: 0.", rich_help_panel=_Fails)
]
Restart = Annotated[
    float | None,
    typer.Option(help="Seconds from a failure until processes have started. Default: 120.", rich_help_panel=_Fails),
]
Replacement = Annotated[
    float | None, typer.Option(help="Seconds more, to replace a node. Default: 300.", rich_help_panel=_Fails)
]
RunDays = Annotated[float | None, typer.Option(help="Length of the job, in days. Default: 30.", rich_help_panel=_Fails)]
OverheadBudget = Annotated[
    float | None, typer.Option(help="Share of training time. Default: 0.03.", rich_help_panel=_Budgets)
]
MemoryBudget = Annotated[float | None, typer.Option(help="GiB of a node. Default: none.", rich_help_panel=_Budgets)]
LossBudget = Annotated[
    float | None,
    typer.Option(help="Probability a month to lose more than memory holds. Default: 0.001.", rich_help_panel=_Budgets),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Time this machine first: copy, redo, encode, disk.", rich_help_panel=_Rates)
]
Directory = Annotated[
    Path | None, typer.Option(help="With --measure: where the disk is. Default: here.", rich_help_panel=_Rates)
]
Link = Annotated[
    str | None, typer.Option(help="With --measure: HOST:PORT of a --listen, to time the link.", rich_help_panel=_Rates)
]
Listen = Annotated[
    str | None,
    typer.Option(help="Serve one --link of another host at HOST:PORT, and end.", rich_help_panel=_Rates),
]
Schemes = Annotated[
    Path | None,
    typer.Option(help="Write the schemes into this file (JSON), for memckpt simulate.", rich_help_panel=_Out),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the schemes into this file.", rich_help_panel=_Out)]


_GB, _GIB, _DAY = 1e9, 2.0**30, 86400.0
_MAGNITUDES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
#: Bytes of an element, and tensors of a parameter's size that an optimizer keeps.
_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
_OPTIMIZERS = {"adam": 2, "adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}
#: Options by field of a job, for messages: the option, and what its unit is.
_OPTIONS = {
    "parameters": "--parameters",
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "replicas": "--replicas",
    "domains": "--domains",
    "gradient_bytes": "--gradient-bytes",
    "state_bytes": "--state-bytes",
    "step_seconds": "--step-seconds",
    "mtbf_seconds": "--mtbf-hours, in hours",
    "node_mtbf_seconds": "--node-mtbf-hours, in hours",
    "software_share": "--software-share",
    "cluster_share": "--cluster-share",
    "domain_share": "--domain-share",
    "network_bytes_per_second": "--network",
    "disk_bytes_per_second": "--disk",
    "copy_bytes_per_second": "--copy",
    "copy_overlap": "--copy-overlap",
    "run_seconds": "--run-days, in days",
    "overhead_budget": "--overhead-budget",
    "memory_budget_bytes": "--memory-budget, in GiB",
    "loss_budget": "--loss-budget",
    "restart_seconds": "--restart-seconds",
    "replacement_seconds": "--replacement-seconds",
}
#: Unit of an option, and its size in the unit of the job's field.
_UNITS = {
    "network_bytes_per_second": ("GB/s", _GB),
    "disk_bytes_per_second": ("GB/s", _GB),
    "copy_bytes_per_second": ("GB/s", _GB),
    "mtbf_seconds": ("hours", 3600.0),
    "memory_budget_bytes": ("GiB", _GIB),
}


def plan(
    parameters: Parameters = None,
    model: Model = None,
    run: LiveRun = None,
    node: Node = None,
    dtype: Dtype = "fp32",
    optimizer: Optimizer = "adamw",
    gradient_bytes: GradientBytes = None,
    state_bytes: StateBytes = None,
    nodes: Nodes = None,
    gpus_per_node: Gpus = None,
    replicas: Replicas = None,
    domains: Domains = None,
    step_seconds: StepSeconds = None,
    network: Network = None,
    disk: Disk = None,
    copy: Copy = None,
    copy_overlap: CopyOverlap = None,
    measure: Measure = False,
    directory: Directory = None,
    link: Link = None,
    listen: Listen = None,
    mtbf_hours: MtbfHours = None,
    node_mtbf_hours: NodeMtbfHours = None,
    software_share: SoftwareShare = None,
    domain_share: DomainShare = None,
    cluster_share: ClusterShare = None,
    restart_seconds: Restart = None,
    replacement_seconds: Replacement = None,
    run_days: RunDays = None,
    overhead_budget: OverheadBudget = None,
    memory_budget: MemoryBudget = None,
    loss_budget: LossBudget = None,
    schemes: Schemes = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ways to protect a training, and recommend a configuration.

    The size of the model comes from --parameters, --model or --run. What is given wins over what is measured, that
    over what a live run shows, that over defaults. Exit status 1 if no scheme keeps the budgets.
    """
    from memckpt_tools.plan import table as plan_table
    from memckpt_tools.planning.schemes import make_plan

    if listen is not None:
        _serve_link(listen)
        return
    if (link is not None or directory is not None) and not measure:
        raise ConfigurationError(f"--{'link' if link else 'directory'}: expected it with --measure")
    if mtbf_hours is not None and node_mtbf_hours is not None:
        raise ConfigurationError("--node-mtbf-hours: expected it without --mtbf-hours, found both")
    if plot is not None:
        _check_plot(plot)
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
    given = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "replicas": replicas,
        "domains": domains,
        "step_seconds": step_seconds,
        "network_bytes_per_second": _in_field_unit("network_bytes_per_second", network),
        "disk_bytes_per_second": _in_field_unit("disk_bytes_per_second", disk),
        "copy_bytes_per_second": _in_field_unit("copy_bytes_per_second", copy),
        "copy_overlap": copy_overlap,
        "mtbf_seconds": _in_field_unit("mtbf_seconds", mtbf_hours),
        "software_share": software_share,
        "domain_share": domain_share,
        "cluster_share": cluster_share,
        "restart_seconds": restart_seconds,
        "replacement_seconds": replacement_seconds,
        "run_seconds": _times(run_days, _DAY),
        "overhead_budget": overhead_budget,
        "memory_budget_bytes": _in_field_unit("memory_budget_bytes", memory_budget),
        "loss_budget": loss_budget,
    }
    facts |= {name: value for name, value in given.items() if value is not None}
    if sized := _size_of(parameters, model):
        facts["parameters"] = sized[0]
        notes.append(sized[1])
    try:
        job = _job(facts, node_mtbf_hours)
        found = make_plan(job)
    except ConfigurationError as error:
        raise ConfigurationError(_with_option(str(error))) from error
    if plot is not None:
        from memckpt_tools.plan.table import draw

        draw(found, plot)
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


def _job(facts: Mapping[str, Any], node_mtbf_hours: float | None) -> Job:
    """The job of what is known; the rest are defaults."""
    from memckpt_tools.planning.job import Job, mtbf_of_nodes

    if "parameters" not in facts:
        raise ConfigurationError("expected --parameters, --model or --run for the size of the model, found none")
    settings: dict[str, Any] = {"nodes": 1, "step_seconds": 1.0, "mtbf_seconds": _DAY, **facts}
    gpus = settings.get("gpus_per_node", Job.gpus_per_node)
    if isinstance(gpus, int) and gpus >= 0:
        settings.setdefault("copy_bytes_per_second", 20 * _GB * gpus if gpus else 4 * _GB)
        settings.setdefault("copy_overlap", Job.copy_overlap if gpus else 0.0)
        rate = Job.redo_parameters_per_second * gpus if gpus else Job.agent_redo_parameters_per_second
        settings.setdefault("redo_parameters_per_second", rate)
    if node_mtbf_hours is not None:
        settings["mtbf_seconds"] = mtbf_of_nodes(node_mtbf_hours * 3600, settings["nodes"])
    return Job(**settings)


def _with_option(message: str) -> str:
    """A message about a field of a job, with the option that sets it."""
    field, colon, rest = message.partition(":")
    option = _OPTIONS.get(field.strip())
    return f"{field} ({option}){colon}{rest}" if option and colon else message


def _in_field_unit(field: str, value: float | None) -> float | None:
    """A value in the unit of a job's field; what is wrong with it is said in the option's unit."""
    from memckpt_tools.planning.checks import require_number
    from memckpt_tools.planning.job import RANGES

    if value is None:
        return None
    unit, factor = _UNITS[field]
    low, high = RANGES[field]
    require_number(_OPTIONS[field].partition(",")[0], value, low / factor, high / factor, unit)
    return value * factor


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _bytes_per_parameter(dtype: str, optimizer: str) -> tuple[float, float]:
    """Bytes of state and of gradient for each parameter."""
    for option, value, known in (("--dtype", dtype, _DTYPES), ("--optimizer", optimizer, _OPTIMIZERS)):
        if value not in known:
            raise ConfigurationError(f"{option}: expected one of {', '.join(known)}, found {value!r}")
    size = _DTYPES[dtype]
    return size * (1.0 + _OPTIMIZERS[optimizer]), float(size)


def parse_count(text: str) -> float:
    """A number with an optional magnitude: ``7B``, ``1.5T``, ``405e9``.

    Raises:
        ConfigurationError: it is none.
    """
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

    size = count_parameters(read_model_config(model))
    return float(size.parameters), f"{size.parameters:,} parameters by {model}: {size.how}"


def read_model_config(path: Path) -> Mapping[str, Any]:
    """A model configuration in JSON, or in YAML where its name does not end in .json.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--model {path}: expected a model configuration, found: {error}") from error
    found = read_tree(path, text, f"--model {path}")
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"--model {path}: expected a mapping of settings, found a {type(found).__name__}")
    return found


def _check_plot(path: Path) -> None:
    from memckpt_tools.plan.table import check

    check(path)


def _serve_link(address: str) -> None:
    from memckpt_tools.plan.measure import parse_address, serve

    host, port = parse_address("--listen", address)
    received, seconds = serve(host, port, lambda place: err.print(f"listening at {place}", markup=False))
    err.print(
        f"{received / 1e9:.2f} GB in {seconds:.1f} s: {received / max(seconds, 1e-9) / 1e9:.2f} GB/s", markup=False
    )
