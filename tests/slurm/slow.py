"""The interpreter of a run that lingers in one phase, so that a signal can hit it there.

PHASE is training, evaluation or save; SECONDS is how long, each time; MARK is a file that is made
when the phase begins. `… -m MODULE arguments` as of an interpreter.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Run a module; where that is megatron_lite.train, slowly."""
    _, flag, module, *rest = sys.argv
    assert flag == "-m"
    sys.argv = [module, *rest]
    if module != "megatron_lite.train":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from megatron_lite import train

    slow_down(os.environ["PHASE"])
    sys.exit(train.main())


def slow_down(phase: str) -> None:
    """Let the phase begin with a pause."""
    from megatron_lite.checkpoint.save import Save
    from megatron_lite.trainer import Trainer

    if phase == "training":
        linger(Trainer, "iteration")
    elif phase == "evaluation":
        linger(Trainer, "_run", when=lambda purpose, *_: purpose == "evaluation")
    elif phase == "save":
        linger(Save, "write")


def linger(owner: type, name: str, when: Callable[..., bool] = lambda *args: True) -> None:
    """Replace a method by one that waits first."""
    method = getattr(owner, name)

    def slowly(self: Any, *args: Any) -> Any:
        if when(*args):
            Path(os.environ["MARK"]).touch()
            time.sleep(float(os.environ["SECONDS"]))
        return method(self, *args)

    setattr(owner, name, slowly)
