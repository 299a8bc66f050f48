"""Time to restore a lost node's state from its peers, compared to own memory, storage and a plain file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import start_server
from benchmarks.workloads.peer_nodes import Nodes
from benchmarks.workloads.peer_ranks import Started, Task
from memckpt import ErasureConfig, MemckptConfig, StorageConfig

TITLE = "Restoring lost nodes from their peers"
METHOD = """\
A GPT with AdamW in fp32, sharded with FSDP2 over nodes of one rank each (gloo), all on one machine. When all records
are acknowledged, all ranks are killed, as launchers do, and of the lost nodes the agents, too; then the training is
started again. Everything restores the same: each rank its shard, of 12 bytes a parameter, all ranks at once. Medians
over the kills, of the slowest rank that counts, in seconds:

- *fetched*: on a lost node, from the request to its new agent until the window of T=8 records, 4 + 12/T bytes a
  parameter each, is decoded in its memory. Its peers work for it on the same cores.
- *into tensors*: from there, or from memory, to the live tensors, with the redo of the window; from storage or a file,
  reading, too. Storage verifies checksums, the file is `torch.load` with `weights_only=True` and a copy. Both are in
  the page cache.
- *restored*: the sum for each rank. The lost nodes' ranks count; from memory, storage and files all do.
- *attached*: from a barrier of all ranks until memckpt had what there was to be restored at hand: where nodes are lost
  with the start of an agent and a replicator for them, connections, the plan, and *fetched*.

The ratios are those of the medians of *restored*. *fetched, MB/s* is the rate at which a lost node's records came, over
all of them where several are lost."""
NODES = 4
PERIOD = 8
#: Steps before a kill: a window, plus the slots in flight.
_STEPS = PERIOD + 4


@dataclass(frozen=True)
class Restart:
    """One kill and restart.

    Attributes:
        started: reports of the ranks, in order.
        counted: ranks whose restore is measured.
    """

    started: list[Started]
    counted: list[Started]

    @property
    def fetched(self) -> float | None:
        return max((each.fetching for each in self.counted if each.fetching is not None), default=None)

    @property
    def fetched_bytes(self) -> int:
        return sum(each.fetched_bytes for each in self.counted)

    @property
    def into_tensors(self) -> float:
        return max(each.restoring for each in self.counted)

    @property
    def restored(self) -> float:
        return max((each.fetching or 0.0) + each.restoring for each in self.counted)

    @property
    def attached(self) -> float:
        return max(each.attaching for each in self.started)


class Training:
    """A training that is killed and restarted. Owns the running attempt."""

    def __init__(self, task: Task) -> None:
        self.nodes = Nodes(task)
        self.nodes.wait_ready()

    def restart(self, tier: str, lost: Sequence[int] = ()) -> Restart:
        """Kill all ranks, and the agents of the lost nodes; restart.

        Raises:
            RuntimeError: the state came from another tier than expected.
        """
        self.nodes.kill(lost)
        task = self.nodes.task
        self.nodes = Nodes(replace(task, attempt=task.attempt + 1, load=tier == "file"))
        started = self.nodes.wait_ready()
        tiers = sorted({each.tier for each in started})
        if tiers != [tier]:
            raise RuntimeError(f"expected a restore from {tier}, found {tiers}; see the logs of ranks and agents")
        counted = [started[node] for node in lost] if tier == "peers" else started
        return Restart(started, counted)

    def close(self) -> None:
        """End the attempt and its agents."""
        self.nodes.close()


@contextmanager
def training(size: str, config: MemckptConfig | None) -> Iterator[Training]:
    with scratch_directory() as directory, closing(Training(Task("fsdp", size, NODES, directory, config))) as begun:
        yield begun


def from_peers(size: str, data: int, losses: Sequence[Sequence[int]], kills: int) -> list[list[Restart]]:
    """Restarts for each choice of lost nodes; without lost nodes, from the nodes' own memory."""
    peers = ErasureConfig(data=data, tolerate=NODES - data)
    config = MemckptConfig(redo="lazy", anchor_period_steps=PERIOD, storage=None, peers=peers)
    found: list[list[Restart]] = [[] for _ in losses]
    with training(size, config) as begun:
        for _ in range(kills):
            for lost, restarts in zip(losses, found, strict=True):
                begun.nodes.take(_STEPS)
                restarts.append(begun.restart("peers" if lost else "local memory", lost))
    return found


def from_storage(size: str, kills: int) -> list[Restart]:
    """Restarts from memckpt's checkpoints after the loss of all agents."""
    storage = StorageConfig(mode="replica", every_steps=PERIOD // 2)
    config = MemckptConfig(redo="lazy", anchor_period_steps=PERIOD, storage=storage)
    found = []
    with training(size, config) as begun:
        for _ in range(kills):
            begun.nodes.take_until_stored(_STEPS)
            found.append(begun.restart("storage", range(NODES)))
    return found


def from_file(size: str, kills: int) -> list[Restart]:
    """Starts in which each rank loads its plain checkpoint."""
    found = []
    with training(size, None) as begun:
        begun.nodes.take(2)
        begun.nodes.save()
        for _ in range(kills):
            found.append(begun.restart("file"))
    return found


# The table


@dataclass(frozen=True)
class Row:
    """A row of restarts."""

    name: str
    restarts: list[Restart]


def add_rows(report: Report, rows: Sequence[Row]) -> None:
    restored = {row.name: statistics.median(each.restored for each in row.restarts) for row in rows}
    for row in rows:
        seconds: dict[str, list[float]] = {
            "fetched": [each.fetched for each in row.restarts if each.fetched is not None],
            "into tensors": [each.into_tensors for each in row.restarts],
            "restored": [each.restored for each in row.restarts],
            "attached": [each.attached for each in row.restarts if each.attached],
        }
        fetched_bytes = [each.fetched_bytes for each in row.restarts]
        rates = [nbytes / took for nbytes, took in zip(fetched_bytes, seconds["fetched"], strict=False)]
        ratios = {other: restored[row.name] / restored[other] for other in (_STORAGE, _FILE)}
        report.add(
            row.name, *(f"{statistics.median(times):.3f}" if times else "-" for times in seconds.values()),
            *(f"{ratio:.2f}" for ratio in ratios.values()),
            f"{statistics.median(rates) / 1e6:.0f}" if rates else "-",
            source=row.name, seconds=seconds, fetched_bytes=fetched_bytes, ratios=ratios,
        )  # fmt: skip
        print(f"{row.name}: restored in {restored[row.name]:.3f} s", flush=True)


_STORAGE = "memckpt's storage, warm"
_FILE = "torch.load, warm"
_NUMBERS = {1: "a node is", 2: "two nodes are"}


def measure(report: Report, size: str, kills: int, codes: Sequence[int]) -> None:
    """Fill the table; `codes`: k of each measured code."""
    rows = []
    for data in codes:
        tolerate = NODES - data
        losses = [(), *(tuple(range(1, count + 1)) for count in range(1, tolerate + 1))]
        names = [
            f"local memory, beside k={data}",
            *(f"peers, k={data}, m={tolerate}: {_NUMBERS[len(lost)]} lost" for lost in losses[1:]),
        ]
        found = zip(names, from_peers(size, data, losses, kills), strict=True)
        rows += [Row(name, restarts) for name, restarts in found]
    numel = sum(started.numel for started in rows[0].restarts[0].started)
    rows += [Row(_STORAGE, from_storage(size, kills)), Row(_FILE, from_file(size, kills))]
    report.notes.append(f"{millions(numel)} parameters, sharded over {NODES} nodes; medians of {kills}.")
    add_rows(report, rows)


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "state from", "fetched, s", "into tensors, s", "restored, s", "attached, s",
        "restored / storage's", "restored / torch.load's", "fetched, MB/s",
    )  # fmt: skip
    report.run["compute threads"] = f"{NODES} ranks of 1"
    start_server("benchmarks.workloads.peer_ranks")
    size = "tiny" if options.quick else "30M"
    try:
        measure(report, size, kills=1 if options.quick else 5, codes=(2,) if options.quick else (3, 2))
    except MemoryError as error:
        report.leave_out(f"everything at {size}", str(error))
    report.write()


if __name__ == "__main__":
    run("peers_restore", main)
