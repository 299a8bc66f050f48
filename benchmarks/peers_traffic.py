"""Bytes that peers send and hold, compared to full-state replication and to coding by XOR reductions."""

from __future__ import annotations

import os
import select
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Report
from benchmarks.harness.scratch import scratch_directory
from benchmarks.harness.turns import start_server
from benchmarks.workloads.peer_nodes import Nodes
from benchmarks.workloads.peer_ranks import Kind, Task
from memckpt import AgentConfig, ErasureConfig, MemckptConfig
from memckpt.processes.launch import spawn_agent
from tests.support.cluster import netns

PERIOD = 8
SIZE = "demo"
TITLE = "Bytes that peers send at each step, and that nodes hold"
METHOD = """\
A GPT with AdamW in fp32, trained on k + m nodes (one rank each, gloo), every record kept by peers so that any m nodes
can be lost, T=8. Counted over the steps of an anchor period, after the first window has been sent, and summed over all
nodes; each step's records are acknowledged before the next step begins. Per step and parameter of the model, which with
FSDP2, and with slices under DDP, is held once over all nodes:

- *pieces*: what memckpt calls bytes per record: the fragments' payloads.
- *messages*: what the transports hand over: pieces with their headers, acknowledgements, the job's watermark.
- *wire*: what the kernel counts as sent by the nodes' network devices. Agents and replicators of each node are in a
  network namespace of their own, with one virtual cable, and trainers are not, so that nothing else goes over it:
  messages with envelopes, encryption, the headers of TCP, IP and Ethernet (of large segments, as the kernel hands them
  to a device that cuts them itself), the transports' acknowledgements, and heartbeats once a second. The ratios are
  its, or those of *messages* where there is none.

The formulas: *design* (k + m - 1)/k x (4 + 12/T). *full state* M - 1 = m copies of 12 bytes, as with Gemini's
replication of the state at every step. *XOR reduction* m x 12 bytes, as with ECCheck. All of them tolerate the loss of
m nodes. Where under DDP every node holds the state, what travels is what is private to a rank, its generators' states
first of all; that does not grow with the model, and no formula is for it.

*held* is what one node has in memory, in MB, the mean of all: regions of its own state and records, and fragments of
other nodes' records."""


@dataclass(frozen=True)
class Scheme:
    """A code, and the training that it protects; `sliced`: whether each node holds its slice of the state only."""

    kind: Kind
    data: int
    tolerate: int
    sliced: bool = False

    @property
    def nodes(self) -> int:
        return self.data + self.tolerate

    @property
    def designed(self) -> float:
        """Bytes per parameter and step."""
        return (self.nodes - 1) / self.data * (4 + 12 / PERIOD)

    @property
    def full_state(self) -> float:
        """Bytes per parameter and step of sending the whole state, in m copies or XOR reductions."""
        return 12.0 * self.tolerate


FULL = (
    *(Scheme("fsdp", data, tolerate) for data, tolerate in ((1, 1), (3, 1), (2, 2), (4, 2))),
    *(Scheme("ddp", data, tolerate, sliced) for data, tolerate in ((1, 1), (2, 1), (3, 1)) for sliced in (False, True)),
)
QUICK = (Scheme("fsdp", 2, 2), Scheme("ddp", 1, 1), Scheme("ddp", 2, 1, sliced=True))


@dataclass(frozen=True)
class Sent:
    """Bytes of all nodes at each step; `wire` is None if it could not be counted.

    `own` and `others` are bytes held of all nodes' own states and records, and of others' records.
    """

    numel: int
    pieces: float
    messages: float
    wire: float | None
    own: int
    others: int


def count(scheme: Scheme) -> Sent:
    """Train, and count.

    Raises:
        MemoryError: this machine has too little memory.
    """
    peers = ErasureConfig(data=scheme.data, tolerate=scheme.tolerate, overhead=1.0)
    config = MemckptConfig(
        redo="lazy",
        anchor_period_steps=PERIOD,
        storage=None,
        peers=peers,
        slices="always" if scheme.sliced else "never",
    )
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        task = Task(scheme.kind, SIZE, scheme.nodes, directory, config)
        if netns.problem(as_root=True) is None:
            network = stack.enter_context(netns.Network(scheme.nodes))
            task = Task(scheme.kind, SIZE, scheme.nodes, directory, config, tuple(network.addresses))
            for node in range(scheme.nodes):
                with network.inside(node):
                    agent = os.pidfd_open(spawn_agent(task.address(node), AgentConfig(linger_seconds=30.0)))
                    stack.callback(_wait_for_end, agent)
        nodes = Nodes(task)
        stack.callback(nodes.close)
        nodes.wait_ready()
        return _count(nodes)


def _wait_for_end(agent: int) -> None:
    """Wait until the agent has left by itself; `agent` is its pidfd."""
    select.select([agent], [], [])
    os.close(agent)


def _count(nodes: Nodes) -> Sent:
    before = PERIOD + 4  # a window, and every slot has been written once
    nodes.take(before, untimed=0)
    sent, wire = _sent(nodes, before)
    pieces = []
    for record in range(before + 1, before + PERIOD + 1):
        nodes.take(1, untimed=0)
        pieces.append(sum(status.bytes_per_record or 0.0 for status in nodes.peers_status(record)))
    sent_now, wire_now = _sent(nodes, before + PERIOD)
    on_wire = None if wire is None or wire_now is None else (wire_now - wire) / PERIOD
    own, others = nodes.held_bytes()
    return Sent(nodes.numel, statistics.mean(pieces), (sent_now - sent) / PERIOD, on_wire, own, others)


def _sent(nodes: Nodes, record: int) -> tuple[int, int | None]:
    """Bytes that all nodes have sent: in messages, and on their network devices."""
    messages = sum(status.bytes_sent for status in nodes.peers_status(record))
    if not nodes.task.hosts:
        return messages, None
    return messages, sum(_device_sent(started.agent) for started in nodes.started)


def _device_sent(agent: int | None) -> int:
    """Bytes sent by the network device of an agent's namespace."""
    for line in Path(f"/proc/{agent}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError(f"expected a device eth0 in the network of agent pid {agent}, found none")


def add_row(report: Report, scheme: Scheme, sent: Sent) -> None:
    def each(nbytes: float | None) -> str:
        return "-" if nbytes is None else f"{nbytes / sent.numel:.3f}"

    formulas, figures = ["-"] * 4, {}
    if scheme.kind == "fsdp" or scheme.sliced:
        most = (sent.messages if sent.wire is None else sent.wire) / sent.numel
        formulas = [
            f"{scheme.designed:.3f}", f"{scheme.full_state:.0f}",
            f"{most / scheme.designed:.3f}", f"{most / scheme.full_state:.3f}",
        ]  # fmt: skip
        figures = {
            "designed_bytes": scheme.designed * sent.numel,
            "full_state_bytes": scheme.full_state * sent.numel,
            "xor_reduction_bytes": scheme.full_state * sent.numel,
        }
    training = "FSDP2" if scheme.kind == "fsdp" else "DDP, slices" if scheme.sliced else "DDP"
    report.add(
        training, f"{scheme.data}, {scheme.tolerate}", str(scheme.nodes), f"{sent.own / scheme.nodes / 1e6:.1f}",
        f"{sent.others / scheme.nodes / 1e6:.1f}", f"{sent.pieces / scheme.nodes / 1e3:.1f}", each(sent.pieces),
        each(sent.messages), each(sent.wire), *formulas,
        kind=scheme.kind, data=scheme.data, tolerate=scheme.tolerate, sliced=scheme.sliced, numel=sent.numel,
        pieces_bytes=sent.pieces, message_bytes=sent.messages, wire_bytes=sent.wire, own_bytes=sent.own,
        others_bytes=sent.others, **figures,
    )  # fmt: skip


def main(options: Options) -> None:
    report = options.report(
        TITLE, METHOD, "training", "k, m", "nodes", "held, MB a node", "of others", "pieces, KB a node", "pieces",
        "messages", "wire", "design", "full state, XOR reduction", "wire / design", "wire / full state",
    )  # fmt: skip
    report.notes.append(f"Model `{SIZE}`; bytes per parameter, sent by all nodes together at each step.")
    if (problem := netns.problem(as_root=True)) is not None:
        report.leave_out("wire", problem)
    start_server("benchmarks.workloads.peer_ranks")
    for scheme in QUICK if options.quick else FULL:
        try:
            sent = count(scheme)
        except MemoryError as error:
            report.leave_out(f"{scheme.kind}, k={scheme.data}, m={scheme.tolerate}", str(error))
            continue
        add_row(report, scheme, sent)
        print(f"{scheme}: {sent}", flush=True)
    report.write()


if __name__ == "__main__":
    run("peers_traffic", main)
