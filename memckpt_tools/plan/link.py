"""The rate of a link between two hosts: bytes for some seconds over one TCP connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from memckpt.errors import ConfigurationError, PeerError

#: How long bytes are sent, and how long anything may be silent.
_SECONDS, _SILENT_SECONDS = 3.0, 10.0
_CHUNK = 1 << 20


def parse_address(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        ConfigurationError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{option}: expected HOST:PORT with a port of 0 to 65535, found {text!r}")
    return host.strip("[]"), int(port)


def serve(host: str, port: int, ready: Callable[[str], object]) -> tuple[int, float]:
    """Accept one connection, and count what it sends until it ends.

    Args:
        host, port: where to listen; port 0: any.
        ready: told the address, once it listens.

    Returns:
        bytes, and seconds from the first to the last.

    Raises:
        PeerError: the address is not to be had, or the connection breaks or is silent.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            ready(f"{host}:{server.getsockname()[1]}")
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_SILENT_SECONDS)
                buffer, received, started = bytearray(_CHUNK), 0, time.perf_counter()
                while count := connection.recv_into(buffer):
                    received += count
                connection.sendall(str(received).encode())
                return received, time.perf_counter() - started
    except OSError as error:
        raise PeerError(f"--listen {host}:{port}: {error}") from error


def link_rate(host: str, port: int, seconds: float = _SECONDS) -> float:
    """Bytes per second that a host takes that serves (:func:`serve`).

    Raises:
        PeerError: it does not answer, or has not received what was sent.
    """
    chunk, sent = bytes(_CHUNK), 0
    try:
        with socket.create_connection((host, port), timeout=_SILENT_SECONDS) as connection:
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                connection.sendall(chunk)
                sent += len(chunk)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(64)
            passed = time.perf_counter() - started
    except OSError as error:
        raise PeerError(f"--link {host}:{port}: {error}; start `memckpt plan --listen` there") from error
    if answer != str(sent).encode():
        raise PeerError(f"--link {host}:{port}: expected that {sent} bytes arrive, found {answer!r}")
    return sent / passed
