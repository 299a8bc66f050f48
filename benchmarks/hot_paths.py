"""Microbenchmarks of the parts of a protected step."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.command import Options, run
from benchmarks.harness.copies import SharedCopy, best_of, copy_bandwidth
from benchmarks.harness.report import Report, millions
from benchmarks.workloads.gpt import Trainee, protected, train
from memckpt import Session
from memckpt.capture.digests import Digests
from memckpt.state import codec, rng
from memckpt.state.optimizers import hyperparameters
from memckpt.state.records import RecordMeta, SubStep, decode_meta, encode_meta

TITLE = "The pieces of a protected step, each by itself"
METHOD = """\
Best of several repetitions of each piece in a loop of its own, with a session attached to a GPT in lazy mode at T =
8. Copies are given as bandwidth, beside a copy between private tensors and one into shared memory, and so
are the digests that ranks take of averages they hold once. The rank state is
what every commit carries beside tensors: random generators, hyperparameters and flags; beside the safe codec stands
what `pickle` takes for the same values, without being safe to read."""


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
            seconds = best_of(action, repetitions)
            report.add(
                name, f"{size / 2**20:.1f} MiB", f"{seconds * 1e6:.1f}", f"{size / seconds / 1e9:.2f}",
                what=name, nbytes=size, seconds=seconds,
            )  # fmt: skip
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
    session.commit()


def add_calls(report: Report, trainee: Trainee, session: Session, repetitions: int) -> None:
    """Parts other than copies: rank state, records, checks."""

    def rank_state() -> bytes:
        return session._rank_state.capture(None, session._recorder.pending.capture()).encode()

    state: Any = codec.decode(rank_state())
    encoded = codec.encode(state)
    pickled = pickle.dumps(state)
    groups = codec.encode(hyperparameters(trainee.optimizer))
    meta = RecordMeta(1, 0, False, (SubStep(0, 0, groups),))
    packed = encode_meta(meta)
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    pieces: list[tuple[str, Callable[[], object], str]] = [
        ("rank state: capture and encode", rank_state, f"{len(encoded):,} bytes"),
        ("of it: random generators", rng.capture, ""),
        ("rank state: encode alone", lambda: codec.encode(state), ""),
        ("pickle.dumps of the same", lambda: pickle.dumps(state), f"{len(pickled):,} bytes"),
        ("rank state: decode", lambda: codec.decode(encoded), ""),
        ("pickle.loads of the same", lambda: pickle.loads(pickled), ""),
        ("pickle.dumps of the generators' own states", lambda: pickle.dumps(generators), ""),
        ("record's scalars: encode", lambda: encode_meta(meta), f"{len(packed):,} bytes"),
        ("record's scalars: decode", lambda: decode_meta(packed), ""),
    ]
    watch = session._recorder.watch
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


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, "what", "size", "microseconds", "GB/s")
    bandwidth = copy_bandwidth()
    report.notes.append(f"One thread copies {bandwidth / 1e9:.2f} GB/s from private into shared memory.")
    trainee = Trainee("demo" if options.quick else "30M")
    with protected(trainee, "lazy T=8") as session:
        train(trainee, session, 13)  # until every slot of the ring has been written
        add_copies(report, trainee, session, repetitions=5 if options.quick else 20)
        add_calls(report, trainee, session, repetitions=50 if options.quick else 300)
        add_commits(report, trainee, session, steps=5 if options.quick else 20)
    report.write()


if __name__ == "__main__":
    run("hot_paths", main)
