"""Exchange: what the ranks tell rank 0 and what it answers, through the job's key-value store.

No collective: it works before any group exists, and when one hangs. Called by the preflight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Exchange:
    """One rank's end of it. `store` is a torch.distributed store; values are JSON's."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size

    def beside(self) -> Exchange:
        """Another connection, for a thread: a call that waits blocks all others of its connection,
        and the making of new ones."""
        return Exchange(self._store.clone(), rank=self.rank, world_size=self.world_size)

    def tell(self, topic: str, value: Any) -> None:
        """Say something as this rank; what it said before on the topic is replaced."""
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def told(
        self, topic: str, *, limit: float, ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """What all ranks (or some) say, once all have or `limit` seconds are over; silent ranks are
        left out."""
        asked = range(self.world_size) if ranks is None else ranks
        keys = {rank: f"{topic}/{rank}" for rank in asked}
        if not limit or not self._wait(list(keys.values()), limit):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: json.loads(value) for rank, value in zip(keys, values, strict=True)}

    def answer(self, topic: str, value: Any) -> None:
        """Say something to all ranks, as rank 0 does; once a topic."""
        self._store.set(f"answer/{topic}", json.dumps(value))

    def answered(self, topic: str, *, limit: float) -> Any:
        """What rank 0 says; TimeoutError where it says nothing in `limit` seconds."""
        key = f"answer/{topic}"
        if not self._wait([key], limit):
            raise TimeoutError(f"rank 0 gave no answer within {limit:g} s ({topic})")
        return json.loads(self._store.get(key))

    def _wait(self, keys: list[str], limit: float) -> bool:
        """Whether all keys were there in time."""
        try:
            self._store.wait(keys, timedelta(seconds=limit))
        except dist.DistStoreError:
            return False
        return True
