"""The address of this node that its peers reach."""

from __future__ import annotations

import ipaddress
import os
import socket

from memckpt.errors import ConfigurationError

#: Address without a host (RFC 5737); the route to it is the default route.
_ELSEWHERE = "192.0.2.1"


def own_address(host: str | None, alone: bool) -> str:
    """The address of this node on the route to the job's master, or on the default route.

    Args:
        host: configured address, which takes precedence; None without one.
        alone: whether all nodes are on this machine. If not, a loopback address is no use: the master's own name may
            resolve to one.

    Raises:
        ConfigurationError: no route leads to another machine.
    """
    if host is not None:
        return host
    for there in (os.environ.get("MASTER_ADDR", _ELSEWHERE), _ELSEWHERE):
        found = _route_to(there)
        if found is not None and (alone or not ipaddress.ip_address(found.partition("%")[0]).is_loopback):
            return found
    if alone:
        return "127.0.0.1"  # no route leads anywhere
    raise ConfigurationError(
        "peers.host: expected an address of this node that its peers can reach, found none: no route leads to the "
        "job's master or elsewhere; set it, or MEMCKPT_PEERS_HOST"
    )


def _route_to(there: str) -> str | None:
    """Local address of the route to another address; None without a route. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
