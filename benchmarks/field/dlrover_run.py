"""``dlrover-run --standalone`` on one node: ``python -m benchmarks.field.dlrover_run -m MODULE ...``.

DLRover 0.6.1 starts its master by a class of torch that takes one argument more in torch 2.13, so that a standalone job
ends before it begins. Here the master is started as a job's operator would, and its address is given to the rest.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from benchmarks.field.trainee import MARK


def main() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    master = subprocess.Popen(
        [sys.executable, "-m", "dlrover.python.master.main", "--port", str(port), "--node_num", "1",
         "--job_name", "field", "--platform", "local"],
    )  # fmt: skip
    launcher = [
        sys.executable, "-m", "dlrover.trainer.torch.main", "--standalone", "--nnodes=1", "--nproc-per-node=1",
        "--max-restarts=9",
    ]  # fmt: skip
    try:
        # The job's name becomes that of its shared memory, which is left behind: the benchmark removes it by its mark.
        job = os.environ.get(MARK, f"field-{os.getpid()}")
        environment = {**os.environ, "DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": job}
        return subprocess.run([*launcher, *sys.argv[1:]], env=environment, check=False).returncode
    finally:
        master.terminate()
        master.wait()


if __name__ == "__main__":
    sys.exit(main())
