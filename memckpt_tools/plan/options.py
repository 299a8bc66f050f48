"""Options of ``memckpt plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memckpt.cli.common import directory_only

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
