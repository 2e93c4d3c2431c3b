"""What the command line answers: exit codes, status.json, and messages instead of tracebacks.

Most runs here are forks that call main; what a new interpreter does is in test_launch.py.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from tests.distributed.models import write_corpus
from tests.distributed.processes import ROOT, Ended, arguments, fork_main
from tests.distributed.small import layout, rows, small_config


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with dropout, on one process."""
    return small_config(
        tmp_path_factory.mktemp("command") / "run.json",
        corpus,
        model={"hidden_dropout": 0.1, "attention_dropout": 0.1},
        training={"train_iters": 4},
        checkpoint={"save": "checkpoints"},
        logging={"tensorboard_dir": "tensorboard"},
    )


LEFT = {"state": "requeue", "iteration": 1, "reason": "exit_duration_in_mins is over"}


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def alone(config: Path, run_dir: Path, *overrides: str, **env: str) -> Ended:
    """Run it as one process."""
    (ended,) = fork_main(arguments(config, run_dir, *overrides), env=env)
    return ended


def losses(run_dir: Path) -> list[float]:
    return [row["lm_loss"] for row in rows(run_dir)]


def assert_refused(ended: Ended, run_dir: Path, *told: str) -> None:
    """Exit code 2, a message without a traceback, and a status that says the same."""
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err and 'File "' not in ended.err
    for part in told:
        assert part in ended.err
    found = status(run_dir)
    assert found["state"] == "refused" and told[0] in found["error"]


def test_a_run_leaves_what_starts_it_again(config: Path, tmp_path: Path) -> None:
    """Exit codes 0 and 3; the kept config, stopped after one step and resumed, repeats the run."""
    first, again = tmp_path / "first", tmp_path / "again"
    ended = alone(config, first)
    assert ended.code == 0 and status(first) == {"state": "done", "iteration": 4}
    assert {path.name for path in first.iterdir() if not path.name.startswith(".")} == {
        "config.json",
        "ds_config.json",
        "metrics.jsonl",
        "preflight.json",
        "status.json",
        "heartbeats",
        "stacks",
        "tensorboard",
        "checkpoints",
    }
    assert json.loads((first / "ds_config.json").read_text())["zero_optimization"]["stage"] == 1
    assert (first / "checkpoints/latest").read_text().strip() == "global_step4"
    assert ended.out.count("iteration        ") == 4

    kept = first / "config.json"
    stopped = alone(kept, again, "training.exit_duration_in_mins=1e-9")
    assert stopped.code == 3, stopped.err
    assert status(again) == LEFT
    assert losses(again) == losses(first)[:1]
    resumed = alone(kept, again, 'checkpoint.load="checkpoints"')
    assert resumed.code == 0 and status(again) == {"state": "done", "iteration": 4}
    assert losses(again) == losses(first)
    assert json.loads((again / "config.json").read_text()) | {"checkpoint": {}} == json.loads(
        kept.read_text()
    ) | {"checkpoint": {}}

    anew = alone(kept, again, "training.exit_duration_in_mins=1e-9")
    replaced = f" WARNING: {again / 'checkpoints'} has checkpoints of an earlier start, up to iter"
    assert replaced in anew.out and not any(" WARNING" in run.out for run in (ended, resumed))


def test_a_run_keeps_clear_of_its_jobs_end(config: Path, tmp_path: Path) -> None:
    """As soon as it knows how long a save takes; the job here has no time left at all."""
    save = "checkpoint.save_interval=3"
    over = {"SLURM_JOB_END_TIME": str(int(time.time()))}
    ended = alone(config, tmp_path, save, **over)
    assert ended.code == 3, ended.err
    assert status(tmp_path) == {
        "state": "requeue",
        "iteration": 3,
        "reason": "the job's time is nearly over",
    }


def test_an_ended_run_that_is_started_again_repeats_nothing(config: Path, tmp_path: Path) -> None:
    resume = ['checkpoint.load="checkpoints"', "checkpoint.exit_on_missing_checkpoint=false"]
    tested = [*resume, "training.eval_interval=4", "training.eval_iters=1", "data.split=80,10,10"]
    assert alone(config, tmp_path, *tested).code == 0
    before = rows(tmp_path, "test")
    assert len(before) == 1
    again = alone(config, tmp_path, *tested)
    assert again.code == 0 and "all iterations done" in again.out
    assert rows(tmp_path, "test") == before


def test_several_processes_say_everything_once(config: Path, tmp_path: Path) -> None:
    """Started with ranks but without torchrun, as srun does: done, stopped, refused."""
    argv = arguments(config, tmp_path / "done", *layout(2, 1))
    ended = fork_main(argv, processes=2)
    assert [one.code for one in ended] == [0, 0], ended[0].err
    assert ended[0].out.count("iteration        4/       4") == 1 and not ended[1].out

    soon = [*layout(2, 1), "training.exit_duration_in_mins=1e-9"]
    ended = fork_main(arguments(config, tmp_path / "soon", *soon), processes=2)
    assert [one.code for one in ended] == [3, 3]
    assert status(tmp_path / "soon") == LEFT

    absent = [*layout(2, 1), f'checkpoint.load="{tmp_path}/nowhere"']
    ended = fork_main(arguments(config, tmp_path / "absent", *absent), processes=2)
    assert [one.code for one in ended] == [2, 2]
    assert [f"{tmp_path}/nowhere" in one.err for one in ended] == [True, False]
    assert_refused(ended[0], tmp_path / "absent", "nowhere: no checkpoint is there")

    wrong = arguments(config, tmp_path / "wrong", *layout(2, 1), "model.num_attention_heads=3")
    ended = fork_main(wrong, processes=2)
    assert [one.code for one in ended] == [2, 2]
    assert_refused(ended[0], tmp_path / "wrong", "model.num_attention_heads")
    assert not ended[1].err


def test_a_stale_status_does_not_outlive_a_refusal(config: Path, tmp_path: Path) -> None:
    """Whoever requeues by status.json must not see that of the run before."""
    (tmp_path / "status.json").write_text('{"state": "requeue"}')
    ended = alone(config, tmp_path, "training.train_iters=-4")
    assert_refused(ended, tmp_path, "training.train_iters")


def test_missing_and_damaged_files_are_refused(config: Path, corpus: Path, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").write_bytes(Path(f"{corpus}{end}").read_bytes())
    here = f'data.data_path="{tmp_path}/corpus"'
    (tmp_path / "corpus.idx").write_bytes(Path(f"{corpus}.idx").read_bytes()[:-9])
    assert_refused(alone(config, tmp_path, here), tmp_path, "corpus.idx")
    (tmp_path / "corpus.idx").write_bytes(Path(f"{corpus}.idx").read_bytes())
    (tmp_path / "corpus.bin").write_bytes(Path(f"{corpus}.bin").read_bytes()[:-2])
    assert_refused(alone(config, tmp_path, here), tmp_path, "corpus.bin")
    (tmp_path / "corpus.bin").unlink()
    assert_refused(alone(config, tmp_path, here), tmp_path, "data.data_path", "corpus.bin")
    missing = alone(tmp_path / "no.json", tmp_path / "new")
    assert missing.code == 2 and "no.json" in missing.err and "Traceback" not in missing.err
    assert not (tmp_path / "new").exists()
    in_the_way = alone(config, corpus.with_suffix(".bin"))
    assert in_the_way.code == 2 and "--run-dir" in in_the_way.err
    assert "Traceback" not in in_the_way.err


@pytest.mark.parametrize("workers", [0, 1])
def test_token_ids_above_the_vocabulary_are_refused(
    workers: int, config: Path, tmp_path: Path
) -> None:
    """They show only when they are read, on whichever rank; nobody waits for the others."""
    foreign = write_corpus(tmp_path / "foreign", vocab=300)
    overrides = [f'data.data_path="{foreign}"', f"data.num_workers={workers}"]
    ended = alone(config, tmp_path / "one", *overrides)
    assert_refused(ended, tmp_path / "one", "token id", "vocabulary has 90", "foreign")
    both = fork_main(arguments(config, tmp_path / "two", *layout(1, 2), *overrides), processes=2)
    assert [one.code for one in both] == [2, 2]
    assert sum("token id" in one.err for one in both) == 1


def test_one_rank_alone_meets_bad_data(config: Path, tmp_path: Path) -> None:
    """One of the two samples of a step is bad: the other rank learns why it must stop."""
    builder = IndexedDatasetBuilder(str(tmp_path / "bad"), np.uint16)
    tokens = np.arange(33) % 90
    tokens[-1] = 99
    builder.add_document(tokens)
    builder.finalize()
    overrides = [f'data.data_path="{tmp_path}/bad"', 'data.split="100,0,0"']
    overrides += ["training.global_batch_size=2"]
    ended = fork_main(arguments(config, tmp_path, *overrides), processes=2)
    assert sorted(one.code for one in ended) == [1, 2]
    for one in ended:
        assert "token id 99" in one.err and "Traceback" not in one.err
        assert ("stops because of rank" in one.err) == (one.code == 1)
    assert status(tmp_path)["state"] == "refused" and "token id 99" in status(tmp_path)["error"]


def test_b51_a_rank_that_hangs_fails_the_run_in_time(config: Path, tmp_path: Path) -> None:
    """Both wait as long as parallel.distributed_timeout_minutes says, here 6 seconds; whichever
    tells, it names the one that hangs, and leaves its stack."""
    overrides = [*layout(1, 2), "parallel.distributed_timeout_minutes=0.1"]
    start = time.monotonic()
    argv = arguments(config, tmp_path, *overrides)
    ended = fork_main(argv, processes=2, env={"FAULT": "hang:1:2"})
    assert 6 < time.monotonic() - start < 40
    assert [one.code for one in ended] == [1, 1]
    found = status(tmp_path)
    assert (found["state"], found["rank"]) == ("failed", 1)
    assert "nothing has moved for 0.1 minutes" in found["error"]
    assert "; rank 0 waits for it" in found["error"] and "imed out" not in found["error"]
    assert all("rank 1 on " in one.err for one in ended)
    assert " in strike" in (tmp_path / "stacks/rank_00001.txt").read_text()


def test_b46_a_port_that_is_taken_is_told_by_all_ranks(config: Path, tmp_path: Path) -> None:
    """By a program that lets others wait: they do not, though no launcher kills them."""
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = arguments(config, tmp_path, *layout(2, 1))
        ended = fork_main(argv, processes=2, env={"MASTER_PORT": str(port)})
    assert time.monotonic() - start < 30
    assert [one.code for one in ended] == [2, 1]
    assert_refused(ended[0], tmp_path, f"can't meet the others at 127.0.0.1:{port}")
    assert status(tmp_path)["unmet"], "so that a job is queued again"
    assert "rank 1 stops because of rank 0" in ended[1].err


def test_b29_a_run_that_can_not_go_on_fails_and_says_where(config: Path, tmp_path: Path) -> None:
    overrides = ["precision.max_consecutive_nonfinite_steps=1"]
    ended = alone(config, tmp_path, *overrides, FAULT="poison:0:2")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    for part in ("training stopped: iteration 2", "rank 0 (stage 0): ", "loss scale 1"):
        assert part in ended.err
    found = status(tmp_path)
    assert (found["state"], found["rank"]) == ("failed", 0) and "iteration 2" in found["error"]


def test_a_failed_save_fails_the_run(config: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    ended = alone(config, tmp_path)
    assert ended.code == 1 and "preflight: rank 0 on node " in status(tmp_path)["error"]
    ended = alone(config, tmp_path, "launch.preflight=off")
    assert ended.code == 1 and "Traceback" not in ended.err
    assert f"saving to {tmp_path}/checkpoints failed" in ended.err
    assert status(tmp_path)["state"] == "failed"


def test_validation_needs_no_torch_and_little_time(config: Path, tmp_path: Path) -> None:
    """A new interpreter; the processor's seconds are counted, which other work does not change."""
    code = (
        "import resource, sys\n"
        "from megatron_lite.train import main\n"
        "code = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, 'torch' in sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )

    def validate(*overrides: str) -> subprocess.CompletedProcess[str]:
        argv = [*arguments(config, tmp_path / "run", *overrides), "--validate-only"]
        return subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    good = validate(*layout(1, 2), "training.global_batch_size=1")
    *warnings, cost = good.stderr.splitlines()
    assert good.returncode == 0
    seconds, torch = cost.split()
    assert float(seconds) < 1.0 and torch == "False"
    assert any("1 micro-batches for 2 pipeline stages" in line for line in warnings)
    assert all(line.startswith("warning: ") for line in warnings)
    assert "micro-batches for" not in good.stdout and '"hidden_size": 32' in good.stdout
    bad = validate("model.hidden_size=33")
    assert bad.returncode == 2 and "model.hidden_size" in bad.stderr and not bad.stdout
    assert not (tmp_path / "run").exists()
