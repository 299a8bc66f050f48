"""How an agent's metrics are shown: an HTTP server for Prometheus, and a file for those who have none.

A thread does all of it, since names are looked up, packages imported, and files written that may be on a network disk.
Whoever asks for metrics asks the agent's event loop: so a scrape says that the loop lives, and without one nothing is
done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memckpt.agent.metrics.figures import Snapshot
from memckpt.errors import AgentGoneError
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import MetricsSettings

if TYPE_CHECKING:  # imported in the thread, where metrics are asked for
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from memckpt.agent.metrics.http import Server

_log = logging.getLogger("memckpt.agent")
#: Seconds from one file to the next.
_FILE_SECONDS = 15.0
#: Longest wait, in seconds, for the event loop's answer, and for the thread at the end.
_ANSWER_SECONDS, _END_SECONDS = 5.0, 2.0

#: Hands the event loop a call; safe to call from any thread.
Post = Callable[[Callable[[], None]], None]


class Collector:
    """What prometheus-client asks; safe to call from any thread.

    Args:
        labels: of every sample.
        post: hands the agent's event loop a call.
        take: makes a snapshot, in the event loop.
    """

    def __init__(self, labels: dict[str, str], post: Post, take: Callable[[], Snapshot]) -> None:
        self._labels = labels
        self._post = post
        self._take = take

    def collect(self) -> Iterator[Metric]:
        """The families now.

        Raises:
            AgentGoneError: the event loop has not answered in time.
        """
        from memckpt.agent.metrics.families import families

        answer: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()

        def take() -> None:
            try:
                answer.set_result(self._take())
            except Exception as error:  # raised to who asks; the agent's loop goes on
                answer.set_exception(error)

        self._post(take)
        try:
            snapshot = answer.result(_ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            raise AgentGoneError(f"the agent has not answered within {_ANSWER_SECONDS:g} s") from None
        return families(snapshot, self._labels)


class Exporter:
    """Owns a thread, its server and its files; :meth:`close` it.

    Args:
        settings: where metrics are shown.
        address: of the agent.
        post: hands the agent's event loop a call.
        take: makes a snapshot, in the event loop.
    """

    def __init__(
        self, settings: MetricsSettings, address: AgentAddress, post: Post, take: Callable[[], Snapshot]
    ) -> None:
        self.settings = settings
        self._address = address
        self._labels = {"run": str(address.run_dir), "node": address.node}
        self._collector = Collector(self._labels, post, take)
        #: Where metrics are shown, or why not, by the way in which they are.
        self._states: dict[str, str] = {}
        #: Files that were written, and what is in them.
        self._written: dict[Path, bytes] = {}
        self._wake_read, self._wake_write = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="memckpt-metrics", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """Where metrics are shown, or why they are not, in words."""
        return "; ".join(dict(self._states).values()) or "about to be shown"

    def close(self) -> None:
        """Show no metrics any more, and remove the files. Idempotent."""
        if not self._closed:
            self._closed = True
            self._wake_write.close()
            self._thread.join(_END_SECONDS)

    # The thread

    def _run(self) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            self._say("server", f"not shown ({error}): pip install 'lightning-memckpt[metrics]'", warn=True)
            self._wake_read.close()
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        with contextlib.closing(self._wake_read), contextlib.ExitStack() as stack:
            stack.callback(self._remove_files)
            server = self._listen(registry)
            if server is not None:
                stack.callback(server.server_close)
            self._work(server, registry)

    def _listen(self, registry: CollectorRegistry) -> Server | None:
        """Listen, and say where, also in a file for Prometheus."""
        host, port = self.settings.host, self.settings.port
        if port is None:
            return None
        from memckpt.agent.metrics.http import Server

        try:
            server = Server(host, port, registry)
        except OSError as error:
            self._say("server", f"not served at {host}, port {port}: {error.strerror or error}", warn=True)
            return None
        shown = f"[{host}]" if ":" in host else host
        self._say("server", f"http://{shown}:{server.server_port}/metrics")
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        found = [{"targets": [f"{reachable}:{server.server_port}"], "labels": self._labels}]
        self._write(self._address.run_dir / f"metrics-{self._address.node}.json", msgspec.json.encode(found) + b"\n")
        return server

    def _work(self, server: Server | None, registry: CollectorRegistry) -> None:
        """Answer requests and write the file, until the end."""
        sources: list[Any] = [self._wake_read, *([server] if server is not None else [])]
        file = self._file()
        due = None if file is None else time.monotonic()
        while True:
            wait = None if due is None else max(0.0, due - time.monotonic())
            ready = select.select(sources, [], [], wait)[0]
            if self._wake_read in ready:
                return
            if server is not None and server in ready:
                server.handle_request()
            if file is not None and due is not None and time.monotonic() >= due:
                self._write_metrics(file, registry)
                due = time.monotonic() + _FILE_SECONDS

    def _file(self) -> Path | None:
        if self.settings.file is None:
            return None
        name = self.settings.file.replace("{node}", self._address.node).replace("{run}", self._address.run_dir.name)
        return self._address.run_dir / Path(name).expanduser()

    def _write_metrics(self, path: Path, registry: CollectorRegistry) -> None:
        import prometheus_client
        from prometheus_client.openmetrics import exposition as openmetrics

        generate: Callable[[Any], bytes] = openmetrics.generate_latest
        if path.suffix == ".prom":
            generate = prometheus_client.generate_latest
        try:
            text = generate(registry)
        except AgentGoneError as error:
            self._say("file", f"{path} is out of date: {error}", warn=True)
            return
        if self._write(path, text):
            self._say("file", str(path))

    def _write(self, path: Path, content: bytes) -> bool:
        """Write a file in one step."""
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            self._say("file", f"{path} cannot be written: {error.strerror or error}", warn=True)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        self._written[path] = content
        return True

    def _remove_files(self) -> None:
        """Remove what nobody else has written since: an agent that takes over has the same files."""
        for path, content in self._written.items():
            with contextlib.suppress(OSError):
                if path.read_bytes() == content:
                    path.unlink()

    def _say(self, way: str, state: str, warn: bool = False) -> None:
        if self._states.get(way) != state:
            _log.log(logging.WARNING if warn else logging.INFO, "metrics: %s", state)
        self._states[way] = state


class Metrics:
    """Belongs to the agent's event loop: shows its metrics where it is told to. Owns an exporter; :meth:`close` it.

    Args:
        address: of the agent.
        fixed: where they are shown, whatever :meth:`configure` says; None: where that says.
        post, take: as for :class:`Exporter`.
    """

    def __init__(
        self, address: AgentAddress, fixed: MetricsSettings | None, post: Post, take: Callable[[], Snapshot]
    ) -> None:
        self._address = address
        self._fixed = fixed
        self._post = post
        self._take = take
        self._exporter: Exporter | None = None

    @property
    def state(self) -> str:
        """Where they are shown, or why they are not; empty if nobody has asked for them."""
        return self._exporter.state if self._exporter is not None else ""

    def begin(self) -> None:
        """Show them where it was decided from the start."""
        if self._fixed is not None:
            self._show(self._fixed)

    def configure(self, settings: MetricsSettings) -> None:
        """Show them where trainers say, if nobody else has decided."""
        if self._fixed is None:
            self._show(settings)

    def _show(self, settings: MetricsSettings) -> None:
        if self._exporter is not None and self._exporter.settings == settings:
            return
        self.close()
        if settings.on:
            self._exporter = Exporter(settings, self._address, self._post, self._take)

    def close(self) -> None:
        """Show them nowhere. Idempotent."""
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = None
