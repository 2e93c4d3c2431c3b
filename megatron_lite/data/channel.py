"""A two-way channel between a process and one forked from it; arrays come back in shared memory.

Called by worker_pool.
"""

from __future__ import annotations

import mmap
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_RING_BYTES = 1 << 23
_SMALLEST = 1 << 12  # bytes; smaller arrays go with the message
_HEAD = struct.Struct("<QQ")  # bytes of the message, arrays in the ring
_PLACE = struct.Struct("<QQQ")


class _Ring:
    """Memory of two processes: one puts arrays in, the other gives them back in the same order."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 8 + _RING_BYTES))
        self._given_back = np.frombuffer(self._memory[:8], dtype=np.int64)  # bytes, ever
        self._arrays = self._memory[8:]
        self._put = 0  # bytes, ever

    def put(self, data: memoryview) -> tuple[int, int, int] | None:
        """Copy an array in; returns its place, None where there is no room."""
        start = self._put % _RING_BYTES
        if start + data.nbytes > _RING_BYTES:  # it must lie in one piece
            start = 0
        end = self._put + (start - self._put) % _RING_BYTES + data.nbytes
        if end - int(self._given_back[0]) > _RING_BYTES:
            return None
        self._arrays[start : start + data.nbytes] = data
        self._put = end
        return start, data.nbytes, end

    def get(self, start: int, size: int) -> memoryview:
        """Return the array at a place."""
        return self._arrays[start : start + size]

    def give_back(self, end: int) -> None:
        """Let everything up to a place be overwritten."""
        self._given_back[0] = end


class Channel:
    """One end. An end whose other side has gone raises EOFError or OSError."""

    def __init__(self, end: socket.socket, ring: _Ring, *, puts: bool) -> None:
        self._end = end
        self._ring = ring
        self._puts = puts

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Return two ends; what the second sends lies in memory that both share."""
        first, second = socket.socketpair()
        ring = _Ring()
        return Channel(first, ring, puts=False), Channel(second, ring, puts=True)

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, message: Any) -> None:
        """Send an object."""
        places: list[tuple[int, int, int]] = []

        def stays_in_message(buffer: pickle.PickleBuffer) -> bool:
            data = buffer.raw()
            place = self._ring.put(data) if self._puts and data.nbytes >= _SMALLEST else None
            if place is not None:
                places.append(place)
            return place is None

        body = pickle.dumps(message, protocol=5, buffer_callback=stays_in_message)
        head = _HEAD.pack(len(body), len(places))
        self._end.sendall(head + b"".join(_PLACE.pack(*place) for place in places) + body)

    def receive(self) -> tuple[Any, Callable[[], None]]:
        """Return the next object, and what must be called when its arrays are no longer used.

        Objects must be let go of in the order in which they came.
        """
        size, count = _HEAD.unpack(self._exactly(_HEAD.size))
        places = list(_PLACE.iter_unpack(self._exactly(count * _PLACE.size)))
        buffers = [self._ring.get(start, length) for start, length, _ in places]
        message = pickle.loads(self._exactly(size), buffers=buffers)
        return message, lambda: self._ring.give_back(places[-1][2]) if places else None

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            received = self._end.recv_into(view)
            if not received:
                raise EOFError("the other side has gone")
            view = view[received:]
        return data
