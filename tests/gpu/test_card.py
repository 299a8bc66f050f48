"""What only a card shows: page-locked slots, memory, compiled blocks, contexts of other processes, warm restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memckpt
from memckpt.capture.evidence import _Sampler
from memckpt.config import MemckptConfig
from memckpt.state.tensors import bits_of
from tests.gpu.cases import alone
from tests.support.trainings.engine_harness import Lab

_ROOT = Path(__file__).resolve().parents[2]
WIDTH = 2048
DTYPES = (torch.float32, torch.bfloat16)
SCRIPT = """
import os, signal
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_memckpt import MemCheckpoint

class Model(BoringModel):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        if self.global_step in (3, 6) and not os.path.exists(f"died-{self.global_step}"):
            open(f"died-{self.global_step}", "w").close()
            if self.global_step == 6:
                open("gate").read()
            os.kill(os.getpid(), signal.SIGKILL)

trainer = pl.Trainer(accelerator="gpu", devices=1, max_steps=9, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, callbacks=[MemCheckpoint("run")])
trainer.fit(Model())
print("ended on", trainer.strategy.root_device, "at step", trainer.global_step)
"""


@pytest.fixture
def card(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU: --device cuda")


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, run_dir: Path, redo: str = "lazy") -> memckpt.Session:
    config = MemckptConfig(redo=redo, storage=None, resume_check="off")  # type: ignore[arg-type]
    session = memckpt.attach(model, optimizer, run_dir=run_dir, config=config)
    session.restore()
    return session


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).to("cuda")
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, session: memckpt.Session | None, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.commit()


def slots_are_page_locked(run_dir: Path) -> None:
    model, optimizer = make()
    session = attach(model, optimizer, run_dir)
    train(model, optimizer, session, 4)
    writer = session._staging.writer
    assert writer is not None
    writer.wait_for_page_locks()
    places = [place for row in range(4) for place in writer.gradient_places.row(row, 0, 0) or () if place is not None]
    assert places
    assert all(place.is_pinned() for place in places)
    session.close()


def memory_is_nearly_what_it_was(run_dir: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, None, 4)
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, None, 8)
    before = torch.cuda.max_memory_allocated()
    session = attach(model, optimizer, run_dir)
    train(model, optimizer, session, 8)
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, session, 8)
    # Anchors, 12 bytes of 8 parameters, are copied within the card first; a parameter takes 16 bytes of it, and more.
    assert torch.cuda.max_memory_allocated() < 1.12 * before
    session.close()


def samples_are_what_tensors_have(run_dir: Path) -> None:
    """They are read by address, in memory that is not the process's to slice."""
    tensors = [torch.randn(numel, device="cuda").to(dtype) for numel in (1, 3, 300, 70_001) for dtype in DTYPES]
    sampler = _Sampler(tensors)
    assert len(sampler._in_memory) == len(sampler._groups) == 2
    for record in (0, 7, 1_000_003):
        for taken, group in zip(sampler.sample_tensors(record, tensors), sampler._groups.values(), strict=True):
            parts = [bits_of(tensors[position])[record % stride :: stride] for position, stride in group]
            assert torch.equal(taken, torch.cat(parts))


def no_other_process_has_a_context(run_dir: Path) -> None:
    model, optimizer = make()
    session = attach(model, optimizer, run_dir, "eager")
    train(model, optimizer, session, 12)
    agent = session.agent_pid
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    found = {int(pid) for pid in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()}
    opened = [name for name in map(os.readlink, Path(f"/proc/{agent}/fd").iterdir()) if name.startswith("/dev/nvidia")]
    assert agent not in found
    assert not opened
    session.close()


def compiled_blocks_stay_in_one_graph(run_dir: Path) -> None:
    from torch._dynamo.utils import counters
    from torch.distributed.fsdp import fully_shard

    alone("cuda")
    model, _ = make()
    for block in model:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = attach(model, optimizer, run_dir)
    train(model, optimizer, session, 6)
    assert not counters["graph_break"], dict(counters["graph_break"])
    session.close()


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    "body",
    [
        slots_are_page_locked,
        memory_is_nearly_what_it_was,
        samples_are_what_tensors_have,
        no_other_process_has_a_context,
        compiled_blocks_stay_in_one_graph,
    ],
    ids=lambda body: body.__name__,
)
def test_card(lab: Lab, body: Callable[[Path], None]) -> None:
    child = lab.fork(lambda: body(lab.run_dir), body.__name__)
    assert child.wait() == 0, child.log.read_text()[-4000:]


@pytest.mark.usefixtures("card")
def test_lightning_restarts_warm(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    os.mkfifo(tmp_path / "gate")  # the second attempt waits for what its end is to show
    command = [sys.executable, "-m", "memckpt", "run", "--", sys.executable, "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        said: list[str] = []
        for line in run.stdout:
            said.append(line)
            if "modules are imported ahead" in line or "restarts will be cold" in line:
                (tmp_path / "gate").write_text("")
                break
        text = "".join([*said, *run.stdout])
    assert run.returncode == 0, text[-4000:]
    assert "restart 2, warm" in text, text[-4000:]
    assert "ended on cuda:0 at step 9" in text
