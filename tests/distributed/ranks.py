"""Runs a function on several gloo ranks, each a fork of one process that has imported everything.

Importing torch and deepspeed costs seconds a process; a fork of a process that did costs none, and
unlike a pool of long-lived workers it starts every test clean. Each run has a watchdog.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=20)
PRELOAD = ["tests.distributed.preloaded"]


class RankFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


def on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, watchdog: float = 60.0
) -> list[Any]:
    """`[function(*args) of each rank]`, rank by rank, with gloo initialised around it.

    Raises RankFailed with every rank's traceback if one raises, and after `watchdog` seconds in any
    case; no process is left.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(sender, store, rank, world_size, function, args)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + watchdog)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(answers) + len(failures) < len(pipes):
        open_ = [p for r, p in enumerate(pipes) if r not in answers and r not in failures]
        # After a first failure the others get a moment to tell what they saw of it.
        left = deadline - time.monotonic() if not failures else 5.0
        ready = wait(open_, timeout=max(0.0, left))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", "the process died without a word"
            (answers if kind == "answer" else failures)[rank] = value
    silent = [r for r in range(len(pipes)) if r not in answers and r not in failures]
    if failures or silent:
        texts = [f"rank {r}:\n{text}" for r, text in sorted(failures.items())]
        texts += [f"rank {r}: no answer in time" for r in silent]
        raise RankFailed("\n".join(texts))
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # As in a run that was started by itself; the method of this process is inherited otherwise.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
        message = ("answer", function(*args))
        dist.barrier()
    except BaseException:
        message = ("failed", traceback.format_exc())
    pipe.send(message)
    pipe.close()
    sys.stdout.flush()
    # Skips destructors of process groups whose peers may be gone.
    os._exit(0)
