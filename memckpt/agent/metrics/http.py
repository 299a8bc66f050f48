"""The HTTP server at which Prometheus asks an agent. Imports prometheus-client."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from memckpt.errors import AgentGoneError

_log = logging.getLogger("memckpt.agent")
#: Longest wait, in seconds, for a client that has connected.
_CLIENT_SECONDS = 10.0


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class Server(ThreadingMixIn, WSGIServer):
    """Listens, and answers each request in a thread of its own. Its owner waits until it is readable.

    Args:
        host: address or name.
        port: TCP port; 0: any.
        registry: what is shown.

    Raises:
        OSError: the address is taken, or none of this node's.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = infos[0]
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]  # typed for IPv4; one of IPv6 begins alike
        self.socket.setblocking(False)  # who connected may be gone again
        self.timeout = 0.0
        self.set_app(_refusing(make_wsgi_app(registry)))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no event."""
        _log.info("a request for metrics from %s failed: %s", client_address, sys.exc_info()[1])


def _refusing(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """An application that answers 503 if the agent's event loop does not answer."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except AgentGoneError as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]

    return answer
