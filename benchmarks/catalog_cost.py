"""Cost of reading the catalog of a store with many checkpoints of many nodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO

import msgspec

from benchmarks.harness.command import Options, run
from benchmarks.harness.scratch import scratch_directory
from memckpt.state.records import Timeline
from memckpt.storage.catalog import read_catalog
from memckpt.storage.format import FORMAT_VERSION, MERGED, Batch, Part, encode_commit
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import StoredFile

TITLE = "Looking through a store of many nodes"
METHOD = """\
A store with complete checkpoints of many nodes, a rank each: commit files as they are, the files that they name empty.
*the first look*: what a writer, a start or `memckpt ls` does that knows nothing of the store: everything is listed and
every commit file is read. *another look*: what the first rank's writer does before each checkpoint, and the last one's
after it: everything is listed, and commit files that are not known are read. *a part of the newest*: what every other
writer does: it lists the commit files of one checkpoint and reads those. From the page cache of a local disk: on a
network file system or an object store the numbers of reads and of listed files are what counts."""


class _CountingStore(LocalStore):
    """A store that counts the files it opens to read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened = 0

    def _open(self, path: str) -> IO[bytes]:
        self.opened += 1
        return super()._open(path)


def _fill(store: LocalStore, nodes: int, checkpoints: int) -> Part:
    """Write the checkpoints; returns the last part."""
    for record in range(1, checkpoints + 1):
        for rank in range(nodes):
            part = Part(
                FORMAT_VERSION, Timeline(1, "0123456789abcdef"), record, record, nodes, (rank,), f"node{rank:03d}",
                rank == 0, float(record), run="run-01234567",
            )  # fmt: skip
            paths = [part.state_path, f"{part.base_directory}/{MERGED}", f"{part.base_directory}/__0_0.distcp"]
            files = tuple(StoredFile(path, 0, "0123456789abcdef") for path in paths)
            part = msgspec.structs.replace(part, files=files)
            for path in (*paths, part.commit_path):
                (store.root / path).parent.mkdir(parents=True, exist_ok=True)
                (store.root / path).write_bytes(encode_commit(part) if path == part.commit_path else b"")
    return part


def main(options: Options) -> None:
    report = options.report(TITLE, METHOD, "nodes", "checkpoints", "what", "s", "files listed", "files read")
    for nodes, checkpoints in [(2, 3)] if options.quick else [(1, 2), (8, 10), (64, 100)]:
        with scratch_directory() as directory:
            store = _CountingStore(directory / "store")
            newest = _fill(store, nodes, checkpoints)
            known: dict[str, Part | Batch] = {}

            def row(what: str, seconds: float, listed: int, read: int) -> None:
                report.add(
                    str(nodes), str(checkpoints), what, f"{seconds:.3f}", str(listed), str(read),  # noqa: B023
                    nodes=nodes, checkpoints=checkpoints, what=what, seconds=seconds, read=read,  # noqa: B023
                )  # fmt: skip

            for what in ("the first look", "another look"):
                opened, started = store.opened, time.perf_counter()
                catalog = read_catalog(store, known)
                row(what, time.perf_counter() - started, len(catalog.files), store.opened - opened)
                assert len(catalog.complete) == checkpoints
            started = time.perf_counter()
            mine = store.find(newest.commit_path.rpartition("/")[0])
            for path in mine:
                store.read(path)
            row("a part of the newest", time.perf_counter() - started, len(mine), len(mine))
    report.write()


if __name__ == "__main__":
    run("catalog_cost", main)
