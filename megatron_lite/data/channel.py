"""A two-way channel between two processes of one machine; arrays cross it without being copied.

Called by worker_pool.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_COUNT = struct.Struct("<Q")


class Channel:
    """One end. An end whose other side has gone raises EOFError or OSError."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return the two ends."""
        first, second = socket.socketpair()
        return Channel(first), Channel(second)

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, message: Any) -> None:
        """Send an object; the memory of its arrays goes as it is."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
        sizes = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
        self._end.sendall(_COUNT.pack(len(parts)) + sizes)
        for part in parts:
            self._end.sendall(part)

    def receive(self) -> Any:
        """Return the next object."""
        (count,) = _COUNT.unpack(self._exactly(_COUNT.size))
        sizes = struct.unpack(f"<{count}Q", self._exactly(count * _COUNT.size))
        head, *buffers = [self._exactly(size) for size in sizes]
        return pickle.loads(head, buffers=buffers)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            received = self._end.recv_into(view)
            if not received:
                raise EOFError("the other side has gone")
            view = view[received:]
        return data
