"""Ports for services of tests."""

from __future__ import annotations

import random
import socket

from megatron_lite.rendezvous import FIRST_PORT, PORTS

CLIENTS = 32_768
"""From here on systems give ports to clients by themselves, at any moment."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, and that neither a client nor a job of ours will take."""
    found: list[int] = []
    for port in random.sample(range(FIRST_PORT + PORTS, CLIENTS), k=CLIENTS - FIRST_PORT - PORTS):
        if len(found) == count:
            break
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
