"""Plans: schemes of a job, expectations, the recommended configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import hydra
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig, TopK
from memckpt.config.settings import from_mapping
from memckpt.errors import ConfigurationError
from memckpt.session.compressed_averages import period_for
from memckpt_hydra import protection
from memckpt_tools.plan.table import as_python, as_yaml, settings_that_differ
from memckpt_tools.planning.job import Failures, Job
from memckpt_tools.planning.scheme import Scheme, Tier, expect
from memckpt_tools.planning.schemes import _setting, compressed_period, make_plan
from tests.support.planning.tiers import daly_wall_seconds

LLAMA = Job(
    parameters=405e9,
    nodes=2048,
    step_seconds=6.0,
    mtbf_seconds=54 * 86400 / 419,
    software_share=0.22,
    domains=128,
    disk_bytes_per_second=2e12,
)
SMALL = Job(parameters=1e8, nodes=8, step_seconds=1.0, mtbf_seconds=86400.0)


def row(job: Job, name: str) -> Any:
    return next(one for one in make_plan(job).rows if one.scheme.name == name)


# Expectations


def test_ettr_of_a_synchronous_scheme_is_dalys_wall_time() -> None:
    interval, write, read, mtbf = 900.0, 60.0, 120.0, 7200.0
    tier = Tier(name="disk", every_steps=interval, lag_steps=0, restore_seconds=read, survives_cluster=True)
    scheme = Scheme(name="sync", overhead=write / interval, tiers=(tier,))
    found = expect(scheme, Failures(node=1 / mtbf), step_seconds=1.0, run_seconds=1e7)
    assert found.ettr == pytest.approx(1e6 / daly_wall_seconds(1e6, interval, write, read, mtbf), rel=1e-9)


def test_a_job_that_starts_over_gets_nowhere() -> None:
    found = expect(
        Scheme(name="none", overhead=0, tiers=()), Failures(node=1 / 3600), step_seconds=1.0, run_seconds=1e6
    )
    assert found.ettr < 1e-9
    assert found.tiers["nodes"] == ""
    calm = expect(Scheme(name="none", overhead=0, tiers=()), Failures(), step_seconds=1.0, run_seconds=1e6)
    assert calm.ettr == 1.0


# Plans


def test_the_plan_of_llama_3() -> None:
    """16,384 GPUs, 419 failures in 54 days: a failure about every 3 hours, 78% of them of hardware."""
    assert LLAMA.mtbf_seconds == pytest.approx(3.1 * 3600, rel=0.01)
    plan = make_plan(LLAMA)
    names = [one.scheme.name for one in plan.rows]
    assert names == [
        "none", "torch.save", "dcp.async_save", "memory", "copies", "(k, m)", "compressed", "log",
    ]  # fmt: skip
    config = plan.recommended.config
    assert isinstance(config.peers, ErasureConfig)
    assert config.peers.tolerate == 2
    assert plan.recommended.monthly_loss is not None
    assert plan.recommended.monthly_loss < 1e-3
    saved = row(LLAMA, "torch.save")
    assert plan.recommended.expectation.ettr > saved.expectation.ettr > row(LLAMA, "none").expectation.ettr
    assert plan.recommended.expectation.lost_steps["nodes"] < 2 < saved.expectation.lost_steps["nodes"]
    assert row(LLAMA, "compressed").problems == ("compression: expected DistributedDataParallel (replicas = nodes)",)


def test_more_replicas_need_no_fragments() -> None:
    found = row(dataclasses.replace(SMALL, nodes=16, replicas=8), "(k, m)")
    assert found.scheme.wire_bytes == 13_000
    assert found.memory.replicator == 0
    assert found.expectation.tiers["nodes"] == "replicas"
    assert row(SMALL, "(k, m)").expectation.tiers["nodes"] == "peers"


def test_where_all_nodes_hold_the_same_each_protects_a_slice_of_it() -> None:
    """As with slices="auto": what a node holds, copies and sends is divided by the number of nodes."""
    found, whole = row(dataclasses.replace(SMALL, replicas=8), "(k, m)"), row(SMALL, "(k, m)")
    assert found.memory.total == pytest.approx(whole.memory.total)
    assert found.scheme.wire_bytes == pytest.approx(whole.scheme.wire_bytes)
    assert found.expectation.tiers["nodes"] == "peers"
    assert found.expectation.recovery_seconds["process"] > whole.expectation.recovery_seconds["process"]


def test_budgets_decide() -> None:
    narrow = dataclasses.replace(SMALL, memory_budget_bytes=1 << 20)
    plan = make_plan(narrow)
    assert plan.recommended is None
    assert plan.reason.startswith("no scheme keeps the budgets: memory: memory: ")
    slow = dataclasses.replace(SMALL, network_bytes_per_second=1e6, encode_bytes_per_second=1e6)
    coded = row(slow, "(k, m)")
    assert coded.expectation.lost_steps["nodes"] > 10
    with_budget = make_plan(dataclasses.replace(SMALL, memory_budget_bytes=64 << 30)).recommended
    assert with_budget.config.agent == AgentConfig(memory_budget_bytes=64 << 30)
    alone = dataclasses.replace(SMALL, nodes=1)
    assert "peers: 3 nodes of 1" in row(alone, "(k, m)").problems
    assert make_plan(alone).recommended is not None


def test_compression_holds_what_it_leaves_out_of_gradients() -> None:
    on_cpu = row(dataclasses.replace(SMALL, replicas=8, gpus_per_node=0), "compressed")
    assert on_cpu.memory.trainer == 4 * SMALL.parameters
    assert not on_cpu.exact, "what was left out is dropped at a resume"
    assert on_cpu.scheme.memory_bytes == on_cpu.memory.total
    assert row(dataclasses.replace(SMALL, replicas=8), "compressed").memory.trainer == 0  # on the accelerators


def test_eager_redo_copies_what_is_stored_while_nothing_waits() -> None:
    """docs/storage.md, "When a checkpoint is written"; lazily trainers copy it at a commit."""
    job = dataclasses.replace(SMALL, copy_overlap=1.0, agent_redo_parameters_per_second=1e12)
    eager, lazy = _setting(job, "memory", "", "eager", None), _setting(job, "memory", "", "lazy", None)
    assert eager.scheme.overhead == 0
    assert lazy.scheme.overhead == pytest.approx(12 * 1e8 / 8 / 20e9 / 60)


def test_racks_that_hold_too_much_of_a_group() -> None:
    spread = dataclasses.replace(SMALL, domains=8, domain_share=0.1)
    together = dataclasses.replace(spread, domains=2)
    for name in ("copies", "(k, m)"):
        assert row(spread, name).monthly_loss < 0.02
    assert row(together, "copies").monthly_loss < 0.02  # two racks, a copy in each
    lost = make_plan(dataclasses.replace(together, domains=1)).rows[4].monthly_loss
    assert lost is not None
    assert lost > 0.9


@given(
    parameters=st.floats(1e6, 1e12),
    nodes=st.sampled_from([1, 2, 5, 64, 4096]),
    step=st.floats(0.01, 100),
    mtbf=st.floats(600, 1e7),
    network=st.floats(1e6, 1e11),
    ddp=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_job_has_a_plan(parameters: float, nodes: int, step: float, mtbf: float, network: float, ddp: bool) -> None:
    job = Job(
        parameters=parameters,
        nodes=nodes,
        step_seconds=step,
        mtbf_seconds=mtbf,
        network_bytes_per_second=network,
        replicas=nodes if ddp else 1,
    )
    plan = make_plan(job)
    for one in plan.rows:
        assert 0 <= one.expectation.ettr <= 1
        assert one.monthly_loss is None or 0 <= one.monthly_loss <= 1
        assert all(steps >= 0 for steps in one.expectation.lost_steps.values())
        assert one.memory.peak >= one.memory.total >= 0
        assert one.config is None or from_mapping(settings_that_differ(one.config)) == one.config
    ours = [one for one in plan.rows if one.config is not None and one.config.compression is None]
    assert (plan.recommended is None) == (not any(one.fits for one in ours))
    assert plan.recommended is None or plan.recommended in ours


def test_the_anchor_period_of_compressed_gradients_is_the_sessions() -> None:
    for parameters in (1e6, 1e8, 1e9, 1e11):
        for gradient_bytes in (0.06, 0.5, 1.0, 2.0):
            for rate, on_host in ((1e8, True), (2e10, False)):
                job = Job(
                    parameters=parameters, nodes=1, step_seconds=1, mtbf_seconds=1e5, redo_parameters_per_second=rate
                )
                expected = period_for(int(parameters), int(gradient_bytes * parameters), 200, on_host)
                assert compressed_period(job, gradient_bytes) == expected


# The configuration as text

CONFIGS = [
    MemckptConfig(),
    MemckptConfig(redo="lazy", peers=ErasureConfig(data=4, tolerate=2, rate_bytes_per_second=1e9)),
    MemckptConfig(peers=ErasureConfig(data=1, tolerate=2), agent=AgentConfig(memory_budget_bytes=1 << 30)),
    MemckptConfig(storage=None),
    MemckptConfig(compression=TopK(ratio=0.02), storage=StorageConfig(mode="log", overhead=1e-5, url="a: 'b' \"c\"")),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_a_configuration_as_text_is_the_same_configuration(config: MemckptConfig, tmp_path: Any) -> None:
    text = as_yaml(config)
    assert from_mapping(yaml.safe_load(text).get("memckpt", {})) == config
    (tmp_path / "app.yaml").write_text(text)
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        composed = hydra.compose("app", overrides=["+run_dir=somewhere"])
    assert protection(composed).config == config, OmegaConf.to_yaml(composed)
    names: dict[str, Any] = {}
    exec(as_python(config), names)
    assert names["config"] == config


# Bad input


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("mtbf_seconds", 0, "mtbf_seconds: expected a number, 1 to 3.2e.09, found 0"),
        ("step_seconds", 450, r"step_seconds: expected at most 300 s \(a time in ms divided by 1000\), found 450"),
        ("step_seconds", 0, "step_seconds: expected a number, more than 0, found 0"),
        ("parameters", -1, "parameters: expected a number, 1 to 1e.15, found -1"),
        ("parameters", "1B", "parameters: .* found '1B'"),
        ("nodes", 0, "nodes: expected a whole number, 1 to 1000000, found 0"),
        ("nodes", 2.5, "nodes: expected a whole number, .* found 2.5"),
        ("replicas", 9, "replicas: expected a divisor of nodes=8, found 9"),
        ("replicas", 3, "replicas: expected a divisor of nodes=8, found 3"),
        ("domains", 9, r"domains: expected 0 to 8 \(nodes\), found 9"),
        ("software_share", 50, "software_share: expected a number, 0 to 1, found 50"),
        ("cluster_share", 0.8, "software_share . cluster_share . domain_share: expected 0 to 1 in sum, found 1.3"),
        ("network_bytes_per_second", 100, "network_bytes_per_second: expected a number, 1000 to 1e.15, found 100"),
        ("overhead_budget", 3, "overhead_budget: expected a number, more than 0, at most 1, found 3"),
        ("memory_budget_bytes", 0, "memory_budget_bytes: expected a number, 1 to 1e.16, or None, found 0"),
        ("run_seconds", 0.1, "run_seconds: expected a step or more, found 0.1"),
        ("state_bytes", 1000, "state_bytes: expected a number, more than 0, at most 256"),
    ],
)
def test_bad_jobs_are_named(field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        dataclasses.replace(SMALL, **{field: value})
