"""A run on two pipeline stages that is started twice, the second time from before its last log."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.models import write_corpus
from tests.distributed.processes import arguments, fork_main
from tests.distributed.small import small_config

SAVED, FIRST_END, END = 4, 10, 14
"""The first start ends at FIRST_END; the second goes on from SAVED, to END."""
SAMPLES = 4
"""Samples of a step."""


def resumed_run(folder: Path) -> Path:
    """Do both starts with all that can be reported on curves; returns the run folder.

    What each start printed is in first.txt and second.txt there.
    """
    config = small_config(
        folder / "run.json",
        write_corpus(folder / "corpus"),
        training={"train_iters": FIRST_END, "eval_interval": 2, "eval_iters": 1},
        data={"split": "80,10,10"},
        checkpoint={"save": "checkpoints", "save_interval": SAVED},
        parallel={"pipeline_model_parallel_size": 2},
        logging={
            "tensorboard_dir": "tensorboard",
            "csv_dir": "csv",
            "log_params_norm": True,
            "log_num_zeros_in_grad": True,
            "profile": True,
            "profile_step_start": 1,
            "profile_step_end": 3,
            "profile_ranks": [1],
        },
    )
    run_dir = folder / "run"
    again = ["checkpoint.load=checkpoints", f"checkpoint.ckpt_step={SAVED}"]
    starts = {"first": [], "second": [*again, f"training.train_iters={END}"]}
    for name, overrides in starts.items():
        ended = fork_main(arguments(config, run_dir, *overrides), processes=2)
        assert [e.code for e in ended] == [0, 0], [e.err for e in ended]
        (run_dir / f"{name}.txt").write_text(ended[0].out)
    return run_dir


def rows_of(path: Path) -> list[dict[str, object]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
