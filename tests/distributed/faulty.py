"""megatron_lite.train with a fault: `FAULT=raise:2:3` lets rank 2 raise in iteration 3.

Kinds: raise, kill (SIGKILL), exit (with code 0), hang, stop (SIGSTOP in its forward), wait (for a
message that never comes), poison (an infinity in every gradient), F, B and W (raise within the
third such action of the iteration). The rank in DEAF ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.engine.interface import Engine
from megatron_lite.rendezvous import launch_facts
from megatron_lite.train import main
from megatron_lite.trainer import Trainer

ACTIONS = {"F": ["forward"], "B": ["backward", "backward_input"], "W": ["backward_weight"]}
"""What an engine does in an action of a kind."""


def strike(kind: str, trainer: Trainer) -> None:
    """Do what the fault says, now."""
    if kind == "raise":
        raise ArithmeticError("a planned fault")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(0)
    if kind == "hang":
        time.sleep(600)
    if kind == "stop":
        for module in trainer.engine.modules().values():
            module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    if kind == "wait":
        other = (dist.get_rank() + 1) % dist.get_world_size()
        dist.recv(torch.zeros(1), src=other)
    if kind == "poison":
        for module in trainer.engine.modules().values():
            for parameter in module.parameters():
                parameter.register_hook(lambda grad: grad * float("inf"))
    if kind in ACTIONS:
        raise_within(trainer.engine, ACTIONS[kind])


def raise_within(engine: Engine, names: list[str]) -> None:
    """Let the third call of the methods `names` raise."""
    sound = iter(range(2))

    def third(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computing(*args: Any) -> Any:
            if next(sound, None) is None:
                raise ArithmeticError("a planned fault")
            return compute(*args)

        return computing

    for name in names:
        setattr(engine, name, third(getattr(engine, name)))


def install(fault: str, deaf: str) -> None:
    """Patch the trainer's loop as the two variables say."""
    rank = str(launch_facts(os.environ).get("rank", 0))
    kind, victim, iteration = fault.split(":")
    step = Trainer.iteration

    def faulty(trainer: Trainer, total: int) -> None:
        if deaf == rank:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == victim and trainer.progress.iteration + 1 == int(iteration):
            strike(kind, trainer)
        step(trainer, total)

    Trainer.iteration = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    if "FAULT" in os.environ:
        install(os.environ["FAULT"], os.environ.get("DEAF", ""))
    sys.exit(main())
