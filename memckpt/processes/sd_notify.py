"""The agent's state for a service manager: systemd's ``sd_notify`` protocol, which others speak, too."""

from __future__ import annotations

import logging
import os
import socket

VARIABLE = "NOTIFY_SOCKET"
READY = "READY=1"
STOPPING = "STOPPING=1"
_log = logging.getLogger("memckpt.agent")


class ServiceManager:
    """The service manager whose socket NOTIFY_SOCKET names; without one, nothing is sent.

    The variable is removed from the environment: processes that the agent starts are not the service.
    """

    def __init__(self) -> None:
        self._path = os.environ.pop(VARIABLE, "")

    def notify(self, state: str) -> None:
        """Send one datagram. A failure is only logged: the agent can serve without it."""
        if not self._path:
            return
        # A leading @ stands for the abstract namespace, whose names begin with a zero byte.
        address = "\0" + self._path[1:] if self._path[0] == "@" else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                sock.sendall(state.encode())
        except OSError as error:
            _log.warning(
                "%s cannot be sent to %s=%s: %s; expected the socket of a service manager, which will assume that this "
                "agent failed to start",
                state,
                VARIABLE,
                self._path,
                error,
            )
