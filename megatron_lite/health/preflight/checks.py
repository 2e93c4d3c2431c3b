"""Preflight: the two checks of one rank, as far as `launch.preflight` wants them. The way in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema import RunConfig
from megatron_lite.health.preflight.exchange import Exchange
from megatron_lite.health.preflight.group_speed import Members
from megatron_lite.health.preflight.groups import check_groups
from megatron_lite.health.preflight.nodes import check_nodes
from megatron_lite.health.preflight.verdict import Judge, PreflightFailed


class Preflight:
    """Every method is called by all ranks together, and raises PreflightFailed on all of them."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        store: Any,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self._config, self._run_dir, self._device = config, run_dir, device
        self._judge = Judge(Exchange(store, rank=rank, world_size=world_size), run_dir)

    def nodes(self, *, local_rank: int, env: Mapping[str, str]) -> None:
        """Before any process group is there."""
        if self._config.launch.preflight != "off":
            with self._timed():
                check_nodes(
                    self._judge,
                    self._config,
                    self._run_dir,
                    local_rank=local_rank,
                    device=self._device,
                    env=env,
                )

    def groups(
        self, groups: Mapping[str, Members], give_up: Callable[[PreflightFailed], Any]
    ) -> None:
        """Once they are there; then rank 0 tells what was found. Where an all-reduce hangs,
        `give_up` is called with the error from a thread, and must end the process."""
        if self._config.launch.preflight == "full":
            with self._timed():
                check_groups(self._judge, groups, device=self._device, give_up=give_up)
        if self._config.launch.preflight != "off":
            self._judge.finish()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._judge.record.seconds += time.perf_counter() - started
