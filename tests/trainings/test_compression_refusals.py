"""What compression refuses: each message says what was expected, what was found, and the remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memckpt
from memckpt import compression
from memckpt.compression import CompressionConfig, HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.errors import ConfigurationError, MemckptError, UnsupportedError, UsageError
from tests.support.cluster.sharded_cases import Setup, ShardedJob, job_of
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import logs, run

COMPRESSORS = [TopK(), RandomK(), Quantized8(), PowerSGD(), HalfPrecision()]
LOSSY = COMPRESSORS[:4]
_TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]

Said = dict[str, str]
"""What was said, by the name of an attempt."""


def attach(job: ShardedJob, model: nn.Module, chosen: CompressionConfig) -> memckpt.Session:
    settings = config(compression=chosen)
    return memckpt.attach(model, torch.optim.AdamW(model.parameters()), run_dir=job.run_dir, config=settings)


def said(attempt: Callable[[], Any]) -> str:
    """The error of an attempt, with its type."""
    try:
        attempt()
    except MemckptError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Net(nn.Module):
    """A layer of another dtype in the middle."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.middle = nn.Linear(64, 64, dtype=dtype)
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x).to(self.middle.weight.dtype))
        return self.last(x.to(torch.float32))


def with_hook(hook: Any, state: Any = None) -> DistributedDataParallel:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(state, hook)
    return model


def sharded(mesh: tuple[int, ...]) -> nn.Module:
    model, names = Net(), ("replicate", "shard")[-len(mesh) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    return model


def flat() -> nn.Module:
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)


def embedded() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))


def models(job: ShardedJob) -> Said:
    """Models that compression is not for."""

    def refused(make: Callable[[], nn.Module], chosen: CompressionConfig | None = None) -> str:
        model = make()
        return said(lambda: attach(job, model, chosen or TopK()).close())

    found = {
        "no DDP": refused(Net),
        "FSDP2": refused(lambda: sharded((2,))),
        "HSDP": refused(lambda: sharded((2, 1))),
        "FSDP1": refused(flat),
        "sparse": refused(embedded),
        "torch's hook": refused(lambda: with_hook(default_hooks.fp16_compress_hook)),
    }
    params = list(Net().parameters())
    found["our hook"] = refused(lambda: with_hook(compression.hook, compression.state(TopK(), params)))
    for dtype in _TYPES:
        for chosen in COMPRESSORS:
            model = DistributedDataParallel(Net(dtype))
            if dtype in (torch.float32, torch.float64) or (chosen in LOSSY and not dtype.is_complex):
                continue  # trained in test_compression.py
            name = f"{type(chosen).__name__} {str(dtype).removeprefix('torch.')}"
            found[name] = said(lambda model=model, chosen=chosen: attach(job, model, chosen).close())  # type: ignore[misc]
    return found


def hooks(job: ShardedJob) -> Said:
    """Hooks that come later, and compressors as plain hooks with a wrong state."""

    def averaged(state: Any) -> str:
        model = with_hook(compression.hook, state)
        return said(lambda: model(torch.ones(2, 32)).sum().backward())

    model = DistributedDataParallel(Net())
    session = attach(job, model, TopK())
    found = {"later": said(lambda: model.register_comm_hook(None, default_hooks.fp16_compress_hook))}
    session.close()
    found["again"] = said(lambda: attach(job, model, TopK()).close())
    found["settings as state"] = averaged(TopK())
    found["no state"] = averaged(None)
    found["another model's"] = averaged(compression.state(TopK(), Net().parameters()))
    sparse: Any = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    model = DistributedDataParallel(sparse)
    model.register_comm_hook(compression.state(TopK(), sparse.parameters()), compression.hook)
    found["sparse"] = said(lambda: model(torch.tensor([1])).sum().backward())
    found["group"] = said(lambda: compression.state(TopK(), Net().parameters(), "all"))  # type: ignore[arg-type]
    alone = [dist.new_group([rank]) for rank in range(2)]
    found["another group"] = said(lambda: compression.state(TopK(), Net().parameters(), alone[1 - dist.get_rank()]))
    return found


def ask(lab: Lab, attempt: Callable[[ShardedJob], Said]) -> Said:
    """What is said on both ranks, which must be the same."""
    job = job_of(lab, Setup("plain", 2), config())

    def body(job: ShardedJob, rank: int) -> None:
        job.join(rank)
        (job.directory / f"said-{rank}").write_text(json.dumps(attempt(job)))
        os._exit(0)  # taking gloo's groups down has been seen to hang

    assert run(lab, job, body) == [0, 0], logs(lab)[-3000:]
    first, second = (json.loads((job.directory / f"said-{rank}").read_text()) for rank in range(2))
    assert first == second
    return dict(first)


def nothing(job: ShardedJob) -> Said:
    attach(job, DistributedDataParallel(Net()), TopK(min_elements=1_000_000)).close()
    return {}


@pytest.mark.promise("what compression cannot be applied to is refused by name")
def test_a_compressor_that_compresses_nothing_says_so(lab: Lab) -> None:
    ask(lab, nothing)
    said = "compression=TopK compresses nothing of this model"
    assert logs(lab).count(said) == 1, "on one rank"


_INSTEAD = "UnsupportedError: compression=TopK: expected a model in DistributedDataParallel, whose averages are "
_LEAVE = "leave out compression, or use DistributedDataParallel"
_HOOK = "UnsupportedError: compression=TopK: expected DistributedDataParallel without a communication hook, found "


@pytest.mark.promise("`compression`, with FSDP1, FSDP2 and HSDP")
def test_models_that_compression_is_not_for(lab: Lab) -> None:
    found = ask(lab, models)
    assert found.pop("no DDP") == f"{_INSTEAD}compressed, found a Net without it; {_LEAVE}"
    shard = "by a reduce-scatter, of which each rank gets its shard only"
    assert found.pop("FSDP2") == (
        f"{_INSTEAD}compressed, found fully_shard (FSDP2): it reduces gradients {shard}; {_LEAVE}"
    )
    assert found.pop("HSDP") == (
        f"{_INSTEAD}compressed, found fully_shard on a mesh of two dimensions (HSDP): torch's HSDP runs its own "
        "all-reduce over the replicas, and FSDPModule.set_all_reduce_hook is called only behind it, so that this "
        f"reduction cannot be replaced; {_LEAVE}"
    )
    assert found.pop("FSDP1") == (
        f"{_INSTEAD}compressed, found FullyShardedDataParallel (FSDP1): it reduces gradients of flat parameters "
        f"{shard}; {_LEAVE}"
    )
    assert found.pop("sparse") == (
        "UnsupportedError: compression: expected dense gradients, found sparse ones of 0 (Embedding with sparse=True); "
        "set sparse=False, or leave out compression"
    )
    assert found.pop("torch's hook").startswith(
        f"{_HOOK}torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook; register none: "
    )
    assert found.pop("our hook").startswith(f"{_HOOK}memckpt.compression.hook.hook; register none: ")
    remedy = "; leave out compression, or freeze or convert it"
    for dtype in ("float16", "bfloat16"):
        assert found.pop(f"HalfPrecision {dtype}") == (
            "UnsupportedError: compression=HalfPrecision: expected parameters in float32 or float64, found "
            f"middle.weight in {dtype}, whose gradients take 16 bits already{remedy}"
        )
    for chosen in COMPRESSORS:
        name = type(chosen).__name__
        wide = "float32 or float64" if chosen not in LOSSY else "float32, float64, float16 or bfloat16"
        assert found.pop(f"{name} complex64") == (
            f"UnsupportedError: compression={name}: expected parameters in {wide}, found middle.weight in complex64"
            f"{remedy}"
        )
    assert found == {}


def test_hooks_that_come_later_and_wrong_states(lab: Lab) -> None:
    found = ask(lab, hooks)
    assert found["later"] == (
        "UnsupportedError: a communication hook of DDP and memckpt's compression both average gradients: leave out "
        "one of them"
    )
    assert found["again"] == (f"{_HOOK}that of an earlier session; wrap the model in a new DistributedDataParallel")
    expected = "UsageError: compression.hook: expected as its state what compression.state(config, params) returns, "
    assert found["settings as state"].startswith(f"{expected}found TopK(")
    assert found["no state"].startswith(f"{expected}found None; register_comm_hook(compression.state(config, params)")
    assert found["another model's"].startswith("UsageError: compression.hook: expected gradients of the parameters ")
    assert found["sparse"].startswith(
        "UnsupportedError: compression: expected dense gradients, found sparse ones; set "
    )
    assert found["group"].startswith("UsageError: compression: expected a process group with this rank in it, or None")
    assert found["another group"].startswith("UsageError: compression: expected a process group with this rank in it")


_GIVE = "give the parameters themselves: [param for param in model.parameters() if param.requires_grad]"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (nn.Linear(4, 4), f"expected parameters, found a Linear; {_GIVE}"),
        (nn.Parameter(torch.ones(2)), f"expected parameters, found a Parameter; {_GIVE}"),
        (list(nn.Linear(4, 4).named_parameters()), f"expected parameters, found a tuple among them; {_GIVE}"),
        ([], "expected at least one parameter, found none (a generator is empty once it was used)"),
        (None, f"expected parameters, found a NoneType; {_GIVE}"),
    ],
)
def test_what_is_given_for_parameters(params: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(f'compression.state(): {message}')}"):
        compression.state(TopK(), params)


def test_there_is_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match=r"found none; call torch\.distributed\.init_process_group\(\) first"):
        compression.state(TopK(), nn.Linear(4, 4).parameters())


@pytest.mark.parametrize("wrong", ["topk", TopK, None, CompressionConfig()])
def test_what_is_given_for_a_compressor(wrong: Any) -> None:
    params = list(nn.Linear(4, 4).parameters())
    with pytest.raises(ConfigurationError, match=r"HalfPrecision object such as TopK\(ratio=0\.01\), found "):
        compression.state(wrong, params)


@pytest.mark.parametrize("chosen", COMPRESSORS, ids=lambda chosen: type(chosen).__name__)
def test_a_plain_hook_refuses_a_type_by_name(chosen: CompressionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    with pytest.raises(UnsupportedError, match="found parameter 1 in complex64"):
        compression.state(chosen, params)
