"""All benchmarks one after the other, each in a process of its own (``make bench``)."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.harness.command import Options, run

#: Order: benchmarks sensitive to noise first, the longest last.
NAMES = (
    "hot_paths",
    "wire",
    "stall",
    "peers_traffic",
    "restore_time",
    "restart_time",
    "storage_rate",
    "peers_restore",
    "sharded_overhead",
    "since",
    "peers_overhead",
    "step_overhead",
    "peers_of_the_field",
)


def main(options: Options) -> int:
    failed = []
    for name in NAMES:
        began = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", "--results", str(options.results)]
        status = subprocess.run([*command, "--quick"] if options.quick else command, check=False).returncode
        outcome = "done" if status == 0 else f"failed with status {status}"
        print(f"{name}: {outcome}, {time.monotonic() - began:.0f} s\n", flush=True)
        if status != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    run("run_all", lambda options: sys.exit(main(options)))
