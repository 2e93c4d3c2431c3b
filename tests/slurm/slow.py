"""The interpreter of a run whose steps take SECONDS_PER_STEP longer: `… -m MODULE arguments`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any


def main() -> None:
    """Run a module; where that is megatron_lite.train, with slow steps."""
    _, flag, module, *rest = sys.argv
    assert flag == "-m"
    sys.argv = [module, *rest]
    if module != "megatron_lite.train":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from megatron_lite import train

    slow_down()
    sys.exit(train.main())


def slow_down() -> None:
    """Let every iteration begin with a pause."""
    from megatron_lite import trainer

    iteration = trainer.Trainer.iteration

    def slowly(self: Any, total: int) -> None:
        time.sleep(float(os.environ["SECONDS_PER_STEP"]))
        iteration(self, total)

    trainer.Trainer.iteration = slowly  # type: ignore[method-assign]
