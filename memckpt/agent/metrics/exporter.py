"""How an agent's metrics are shown: an HTTP server for Prometheus, and a file for those who have none.

prometheus-client serves and writes them. A thread has it do so, since names are looked up, packages imported, and files
written that may be on a network disk. Each scrape asks the agent's event loop, and so says that the loop lives.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import threading
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

_log = logging.getLogger("memckpt.agent")
#: Seconds from one file to the next.
_FILE_SECONDS = 15.0
#: Longest wait, in seconds, for the event loop's answer, for a client's request, and for the thread at the end.
_ANSWER_SECONDS, _CLIENT_SECONDS, _END_SECONDS = 5.0, 10.0, 2.0

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
        predecessor: has been told to stop; it may have the same port and the same files.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        address: AgentAddress,
        post: Post,
        take: Callable[[], Snapshot],
        predecessor: Exporter | None = None,
    ) -> None:
        self.settings = settings
        self._address = address
        self._labels = {"run": str(address.run_dir), "node": address.node}
        self._collector = Collector(self._labels, post, take)
        #: Where metrics are shown, or why not, by the way in which they are.
        self._states: dict[str, str] = {}
        #: Files that were written, and the inode and time of each.
        self._written: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._predecessor = predecessor
        self._thread = threading.Thread(target=self._run, name="memckpt-metrics", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    @property
    def state(self) -> str:
        """Where metrics are shown, or why they are not, in words."""
        return "; ".join(dict(self._states).values()) or "about to be shown"

    def stop(self) -> None:
        """Have the thread show no metrics any more, and remove the files; it needs half a second. Idempotent."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and wait for it. Idempotent."""
        self.stop()
        self._thread.join(_END_SECONDS)

    # The thread

    def _run(self) -> None:
        if self._predecessor is not None:
            self._predecessor._thread.join()
            self._predecessor = None
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            self._say("server", f"not shown ({error}): pip install 'lightning-memckpt[metrics]'", warn=True)
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        with contextlib.ExitStack() as stack:
            if self.settings.port is not None:
                self._serve(self.settings.host, self.settings.port, registry, stack)
            stack.callback(self._remove_files)
            file = self._file()
            while file is not None and not self._stop.is_set():
                self._write_metrics(file, registry)
                self._stop.wait(_FILE_SECONDS)
            self._stop.wait()

    def _serve(self, host: str, port: int, registry: CollectorRegistry, stack: contextlib.ExitStack) -> None:
        """Serve, and say where, also in a file for Prometheus; `stack` ends it."""
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            self._say("server", f"not served at {host}, port {port}: {error.strerror or error}", warn=True)
            return
        stack.callback(thread.join)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        handler: Any = server.RequestHandlerClass  # it would wait for ever for what a client asks
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _CLIENT_SECONDS})
        shown = f"[{host}]" if ":" in host else host
        self._say("server", f"http://{shown}:{server.server_port}/metrics")
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        found = [{"targets": [f"{reachable}:{server.server_port}"], "labels": self._labels}]
        path = self._address.run_dir / f"metrics-{self._address.node}.json"
        part = path.with_name(f".{path.name}.{self._address.node}")
        try:
            part.write_bytes(msgspec.json.encode(found) + b"\n")
            part.replace(path)
        except OSError as error:
            self._say("file", f"{path} cannot be written: {error.strerror or error}", warn=True)
            return
        self._note_written(path)

    def _file(self) -> Path | None:
        if self.settings.file is None:
            return None
        name = self.settings.file.replace("{node}", self._address.node).replace("{run}", self._address.run_dir.name)
        return self._address.run_dir / Path(name).expanduser()

    def _write_metrics(self, path: Path, registry: CollectorRegistry) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(path), registry)
        except AgentGoneError as error:
            self._say("file", f"{path} is out of date: {error}", warn=True)
        except OSError as error:
            self._say("file", f"{path} cannot be written: {error.strerror or error}", warn=True)
        else:
            self._note_written(path)
            self._say("file", str(path))

    def _note_written(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            found = path.stat()
            self._written[path] = found.st_ino, found.st_mtime_ns

    def _remove_files(self) -> None:
        """Remove what nobody else has written since: an agent that takes over has the same files."""
        for path, written in self._written.items():
            with contextlib.suppress(OSError):
                found = path.stat()
                if (found.st_ino, found.st_mtime_ns) == written:
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
        return "" if self._exporter is None or self._exporter.stopped else self._exporter.state

    def show_as_configured(self) -> None:
        """Show them where it was decided from the start."""
        if self._fixed is not None:
            self._show(self._fixed)

    def configure(self, settings: MetricsSettings) -> None:
        """Show them where trainers say, if nobody else has decided."""
        if self._fixed is None:
            self._show(settings)

    def _show(self, settings: MetricsSettings) -> None:
        former = self._exporter
        if former is not None:
            if former.settings == settings and not former.stopped:
                return
            former.stop()
        if settings.on:
            self._exporter = Exporter(settings, self._address, self._post, self._take, former)

    def close(self) -> None:
        """Show them nowhere. Idempotent."""
        if self._exporter is not None:
            self._exporter.close()
        self._exporter = None
