"""An S3 server in its own process, which tests can also stop: it then accepts connections and never answers."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_START_SECONDS, _END_SECONDS = 60.0, 10.0


class S3Server:
    """Owns the process. :meth:`close` it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _START_SECONDS)[0]:
            self.close()
            raise TimeoutError("the S3 server does not start")
        self.port = int(self._process.stdout.readline())

    def environment(self) -> dict[str, str]:
        """The variables for a client, without the machine's settings for other servers."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }

    def stop_answering(self) -> None:
        """Stop the process: the kernel still accepts connections; nobody reads from them."""
        os.kill(self.pid, signal.SIGSTOP)

    def answer_again(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if process.poll() is None:
            self.answer_again()
            process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def main() -> None:
    """Serve until standard input ends: the owner has closed it, or is gone."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
