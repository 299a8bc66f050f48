"""Failures drawn or read, and replayed on schemes of protection: what a training loses, and recovers from where."""

from memckpt_tools.simulation.failures import KINDS, Cluster, FailureModel, Failures
from memckpt_tools.simulation.lifetimes import Exponential, Lifetime, Weibull
from memckpt_tools.simulation.replay import NOTHING, Outcome, Repair, Training, replay
from memckpt_tools.simulation.run import DEFAULT_CONFIDENCE, Setup, Summary, simulate
from memckpt_tools.simulation.statistics import Estimate
from memckpt_tools.simulation.sweep import Sweep, sweep, with_mean_scaled, with_nodes
from memckpt_tools.simulation.trace import parse_trace, read_trace

__all__ = [
    "DEFAULT_CONFIDENCE",
    "KINDS",
    "NOTHING",
    "Cluster",
    "Estimate",
    "Exponential",
    "FailureModel",
    "Failures",
    "Lifetime",
    "Outcome",
    "Repair",
    "Setup",
    "Summary",
    "Sweep",
    "Training",
    "Weibull",
    "parse_trace",
    "read_trace",
    "replay",
    "simulate",
    "sweep",
    "with_mean_scaled",
    "with_nodes",
]
