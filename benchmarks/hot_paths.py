"""Microbenchmarks of what every record passes: staging, redo, encoding, storage and the wire."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import xxhash
import zmq
from torch import Tensor, nn

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import SharedCopy, best_of, copy_bandwidth
from benchmarks.harness.report import Report, millions
from benchmarks.harness.scratch import scratch_directory
from benchmarks.workloads.gpt import NO_AUDIT, OPTIMIZERS, Trainee, Training, protected, train
from memckpt import Session
from memckpt.capture.by_value import Digests
from memckpt.capture.live_state import LiveState
from memckpt.capture.spec_request import SpecRequest
from memckpt.replication.coding.code import STRIPE_BYTES, Candidate, Code, decode_stripe, seal_stripe
from memckpt.replication.transport.directory import make_keys
from memckpt.replication.transport.transport import Delivery, Limits, Transport
from memckpt.state import codec, rng
from memckpt.state.layout import Layout
from memckpt.state.optimizers import hyperparameters, rebuild_like
from memckpt.state.records import RecordMeta, SubStep, decode_meta, encode_meta
from memckpt.state.redo import RedoGroup, RedoTarget
from memckpt.storage import dcp
from memckpt.storage.local_store import LocalStore

TITLE = "The paths of a record, each by itself"
METHOD = """\
Best of several repetitions of each piece in a loop of its own, with a session attached to a GPT in lazy mode at T = 8.
Rates count the bytes given as size: what is copied, redone, encoded, written or sent. Beside a copy into a slot stand
one between private tensors and one into shared memory; beside redo the optimizer's own `step()` on the same tensors;
beside coding a checksum of the same stripes and their copy. The rank state is what every commit carries beside tensors:
random generators, hyperparameters and flags. A write has checksums and is synced. What goes over the wire is encrypted;
sender and receiver are two transports in one thread, over loopback."""
TENSORS_TITLE = "What protection adds to a step of many small tensors"
TENSORS_METHOD = """\
Models of layers of 16 x 16 (weight and bias) and fused AdamW: tensors so small that each costs more than its bytes do.
Four of them take turns in one process, a step each, in an order that is drawn: one with an empty hook in Python on each
parameter, one with a hook that copies each gradient into shared memory, one with a session, lazy at T = 8, without
audit, and one as it is. Given is CPU time of the training thread in microseconds: medians of the parts of a step, less
those of the last one. Two tensors show what a step costs however small it is. A busy machine makes CPU time longer,
too, as caches and the halves of a core are shared: compare figures of one run only."""
_OURS = "memckpt"
#: Of coded stripes: k and m, and bytes.
_CODE = (4, 2)
_STRIPES = 256
#: Of messages: their size, and the number that is sent.
_PAYLOAD_BYTES = 128 << 10
_MESSAGES = 256


def add_rate(report: Report, name: str, seconds: float, nbytes: int) -> None:
    """A row of a piece that works on bytes."""
    report.add(
        name, f"{nbytes / 2**20:.1f} MiB", f"{seconds * 1e6:.1f}", f"{nbytes / seconds / 1e9:.2f}",
        what=name, nbytes=nbytes, seconds=seconds,
    )  # fmt: skip


def add_copies(report: Report, trainee: Trainee, session: Session, repetitions: int) -> None:
    """The staging copies, compared to plain copies of the same tensors."""
    trainee.model.loss(*trainee.batch).backward()
    gradients = [param.grad for param in trainee.model.parameters() if param.grad is not None]
    writer = session._staging.writer
    assert writer is not None
    record = int(session.metrics()["step"]) + 1  # the open slot, not read before its commit
    views = [
        writer.gradient_places.view(record, 0, 0, writer.index[id(param)])
        for param in trainee.model.parameters()
        if param.grad is not None
    ]
    private = [torch.empty_like(gradient) for gradient in gradients]
    shared = SharedCopy(gradients)

    def copy_all(targets: list[torch.Tensor]) -> None:
        for target, gradient in zip(targets, gradients, strict=True):
            target.copy_(gradient)

    nbytes = sum(gradient.nbytes for gradient in gradients)
    anchors = sum(piece.nbytes for piece in writer.layout.due(record))
    pieces: list[tuple[str, Callable[[], object], int]] = [
        ("gradients to private tensors", lambda: copy_all(private), nbytes),
        ("gradients to shared memory", lambda: shared.take(gradients), nbytes),
        ("gradients to their slot", lambda: copy_all(views), nbytes),
        ("anchors due in one record to their slot", lambda: writer.stage_anchors(record), anchors),
        ("digests of as many bytes as gradients", lambda: Digests(gradients, writer._copier), nbytes),
    ]
    with torch.no_grad():
        for name, action, size in pieces:
            add_rate(report, name, best_of(action, repetitions), size)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    session.commit()


def add_calls(report: Report, trainee: Trainee, session: Session, repetitions: int) -> None:
    """Parts other than copies: rank state, records, checks."""

    def rank_state() -> bytes:
        return session._rank_state.capture(None, session._recorder.pending.capture()).encode()

    state: Any = codec.decode(rank_state())
    encoded = codec.encode(state)
    groups = codec.encode(hyperparameters(trainee.optimizer))
    meta = RecordMeta(1, 0, False, (SubStep(0, 0, groups),))
    packed = encode_meta(meta)
    pieces: list[tuple[str, Callable[[], object], str]] = [
        ("rank state: capture and encode", rank_state, f"{len(encoded):,} bytes"),
        ("of it: random generators", rng.capture, ""),
        ("rank state: encode alone", lambda: codec.encode(state), ""),
        ("rank state: decode", lambda: codec.decode(encoded), ""),
        ("record's scalars: encode", lambda: encode_meta(meta), f"{len(packed):,} bytes"),
        ("record's scalars: decode", lambda: decode_meta(packed), ""),
    ]
    watch = session._recorder._watch
    assert watch is not None
    pieces.append(("look for changes outside the optimizer", watch.changed, ""))
    tensors = sum(1 for _ in trainee.model.parameters())
    report.notes.append(f"{millions(trainee.model.numel)} parameters in {tensors} tensors.")
    for name, action, size in pieces:
        seconds = best_of(action, repetitions)
        report.add(name, size, f"{seconds * 1e6:.1f}", "", what=name, seconds=seconds, tensors=tensors)


def add_commits(report: Report, trainee: Trainee, session: Session, steps: int) -> None:
    """Cost of commit() in a real training, as counted by the session."""
    before = session.stall.commit
    train(trainee, session, steps)
    milliseconds = (session.stall.commit - before) / steps * 1e3
    report.notes.append(f"commit() without anchors, mean of {steps} training steps: {milliseconds:.2f} ms.")


class Layers(nn.Module):
    """Parallel layers of 16 x 16: tensors so small that each costs more than its bytes do."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(tensors // 2)])

    def loss(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).square().mean()


def _copy_to(view: Tensor) -> Callable[[Tensor], None]:
    """A hook that copies a gradient."""

    def copy(param: Tensor) -> None:
        assert param.grad is not None
        view.copy_(param.grad)

    return copy


def add_small_tensors(report: Report, tensors: int, rounds: int) -> None:
    """CPU time of the training thread that protection, and bare hooks, add to each part of a step of small tensors."""
    batch, nothing = (torch.randn(4, 16),), "nothing"
    arms = {name: Training(Layers(tensors), batch) for name in ("an empty hook", "a hook that copies", _OURS, nothing)}
    for param in arms["an empty hook"].model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: None)
    copied = list(arms["a hook that copies"].model.parameters())
    for param, view in zip(copied, SharedCopy(copied).views, strict=True):
        param.register_post_accumulate_grad_hook(_copy_to(view))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken: dict[str, list[list[float]]] = {name: [] for name in arms}
    with protected(arms[_OURS], f"lazy T=8{NO_AUDIT}") as session:
        for number in range(24 + rounds):  # past all slots, and past the records that are compared in full
            for name in random.Random(number).sample(list(arms), len(arms)):  # each one's caches were the others'
                trainee, marks = arms[name], [time.thread_time()]
                trainee.loss().backward()
                marks.append(time.thread_time())
                trainee.optimizer.step()
                trainee.optimizer.zero_grad()
                marks.append(time.thread_time())
                if name == _OURS:
                    session.commit()
                marks.append(time.thread_time())
                taken[name].append([after - before for before, after in pairwise(marks)])
    torch.set_num_threads(threads)
    medians = {name: [statistics.median(part) for part in zip(*of[24:], strict=True)] for name, of in taken.items()}
    for name in list(arms)[:-1]:
        added = [(with_us - without) * 1e6 for with_us, without in zip(medians[name], medians[nothing], strict=True)]
        report.add(
            f"{tensors:,}", name, *(f"{part:,.0f}" for part in (*added, sum(added))), f"{sum(added) / tensors:.1f}",
            what=name, tensors=tensors, backward=added[0], optimizer=added[1], commit=added[2],
        )  # fmt: skip


def add_redo(report: Report, size: str, optimizer: str, repetitions: int) -> None:
    """Redo of a record whose gradients are in memory, and the optimizer's own step, in one thread."""
    trainee = Trainee(size, optimizer)
    trainee.step()
    request = SpecRequest("eager", 1, 2, local_ranks=(0,), world_size=1)
    layout = Layout(LiveState(trainee.model, [trainee.optimizer], {}).spec(request))
    live = dict(trainee.model.named_parameters())
    gradients: list[Tensor] = []
    targets: list[RedoTarget] = []
    for index, spec in enumerate(layout.spec.params):
        param = live[spec.tensor.name]
        param.grad = torch.randn_like(param) * 1e-3
        gradients.append(param.grad)
        state = {key: value.clone() for key, value in trainee.optimizer.state[param].items()}
        targets.append(RedoTarget(index, 0, param.numel(), nn.Parameter(param.detach().clone()), {0: state}))
    group = RedoGroup(layout, targets, lambda _, groups: rebuild_like(trainee.optimizer, groups))
    meta = RecordMeta(1, 0, False, (SubStep(0, 0, codec.encode(hyperparameters(trainee.optimizer))),))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    redo = best_of(lambda: group.apply(meta, lambda _, __, index, ___=None: gradients[index]), repetitions)
    step = best_of(lambda: trainee.optimizer.step(), repetitions)
    torch.set_num_threads(threads)
    nbytes = sum(gradient.nbytes for gradient in gradients)
    add_rate(report, f"redo of a record, {optimizer} AdamW", redo, nbytes)
    add_rate(report, "step() of the same optimizer", step, nbytes)


def add_coding(report: Report, repetitions: int) -> None:
    """Stripes to pieces, and back from the pieces that take most work."""
    stripes = torch.randint(0, 256, (_STRIPES, STRIPE_BYTES), dtype=torch.uint8).numpy()
    with closing(Code(*_CODE)) as code:
        about: dict[str, Any] = {"generation": "generation", "owner": (0,), "record": 1, "stripe": 0, "stripes": 1}
        seal: Callable[[memoryview], Any] = partial(seal_stripe, code, **about)
        sealed = [Candidate(f"node{piece}", *each) for piece, each in enumerate(seal(stripes[0].data))]
        decode = partial(decode_stripe, code, sealed[-code.data :], length=STRIPE_BYTES, **about)
        sides: dict[str, Callable[[memoryview], object]] = {
            "encode": code.encode,
            "encode and seal": seal,
            "checksum and copy": lambda stripe: xxhash.xxh3_128_digest(bytes(stripe)),
            "decode": lambda _: decode(),
        }

        def work(side: Callable[[memoryview], object]) -> None:
            for stripe in stripes:
                side(stripe.data)

        for name, side in sides.items():
            seconds = best_of(partial(work, side), repetitions)
            add_rate(report, f"stripes, k={_CODE[0]}, m={_CODE[1]}: {name}", seconds, stripes.nbytes)


def add_write(report: Report, size: str, repetitions: int) -> None:
    """Parameters, to a store on a disk."""
    tensors = {name: param.detach() for name, param in Trainee(size).model.named_parameters()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with scratch_directory() as directory:
        store = LocalStore(directory)
        seconds = best_of(lambda: dcp.save(store, "base", tensors), repetitions)
    add_rate(report, "write of parameters to storage", seconds, nbytes)


def add_wire(report: Report, repetitions: int) -> None:
    """Messages from one transport to another one."""
    keys, payload, body = make_keys(), memoryview(bytes(_PAYLOAD_BYTES)), bytes(64)
    limits = Limits(window_bytes=32 << 20)
    with ExitStack() as stack:
        ends = [Transport(name, "127.0.0.1", keys=keys, limits=limits) for name in ("sender", "receiver")]
        poller = zmq.Poller()
        for end in ends:
            stack.callback(end.close)
            end.register(poller)
        sender, receiver = ends
        sender.connect("receiver", receiver.address)

        def send_all() -> None:
            sent = received = 0
            while received < _MESSAGES:
                while sent < _MESSAGES and sender.room("receiver") >= len(payload) + len(body):
                    sender.send("receiver", body, payload)
                    sent += 1
                for end in ends:
                    while (event := end.receive()) is not None:
                        received += isinstance(event, Delivery)
                poller.poll(math.ceil(min(0.01, *(end.tend(time.monotonic()) for end in ends)) * 1000))

        add_rate(report, "messages over the wire", best_of(send_all, repetitions), _MESSAGES * _PAYLOAD_BYTES)


def main(options: Options) -> None:
    columns = ("tensors", "added by", "backward", "optimizer", "commit", "a step", "a step's, by tensor")
    small = options.report(TENSORS_TITLE, TENSORS_METHOD, *columns, part="tensors")
    for tensors in (50,) if options.quick else (2, 50, 250, 1_000, 10_000):
        add_small_tensors(small, tensors, rounds=5 if options.quick else min(400, 100_000 // tensors))
    small.write()
    report = options.report(TITLE, METHOD, "what", "size", "microseconds", "GB/s")
    bandwidth = copy_bandwidth()
    report.notes.append(f"One thread copies {bandwidth / 1e9:.2f} GB/s from private into shared memory.")
    size, repetitions = ("demo", 3) if options.quick else ("30M", 7)
    trainee = Trainee(size)
    with protected(trainee, "lazy T=8") as session:
        train(trainee, session, 13)  # until every slot of the ring has been written
        add_copies(report, trainee, session, repetitions=5 if options.quick else 20)
        add_calls(report, trainee, session, repetitions=50 if options.quick else 300)
        add_commits(report, trainee, session, steps=5 if options.quick else 20)
    for optimizer in OPTIMIZERS:
        add_redo(report, size, optimizer, repetitions)
    add_coding(report, repetitions)
    add_write(report, size, repetitions)
    add_wire(report, repetitions)
    report.write()


if __name__ == "__main__":
    run("hot_paths", main)
