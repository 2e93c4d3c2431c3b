"""The README's first command, shortened, in a copy of the repository: text to model, twice."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORTER = ["--set", "training.train_iters=4", "--set", "logging.log_interval=1"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository."""
    folder = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def quickstart(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", *arguments],
        cwd=folder,
        env=os.environ | {"VENV": str(ROOT / ".venv")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    not (ROOT / ".venv/bin/python").exists(), reason="needs .venv: start with tests/run.sh"
)
def test_the_quickstart_trains_and_then_uses_again_what_it_made(copy: Path) -> None:
    first = quickstart(copy, *SHORTER)
    run = copy / "runs/quickstart"
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if row["event"] == "train"]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 8.5  # ln 4096 = 8.3
    assert (run / "checkpoints/latest").read_text().strip() == "global_step4"
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    for told in ("lm loss first:", "tokens per second:", "peak memory (MiB):", "loss scale:"):
        assert told in first
    assert "tensorboard --logdir runs/quickstart/tensorboard" in first
    other = (copy / "runs/quickstart-resharded/metrics.jsonl").read_text().splitlines()
    goes_on = [row for row in map(json.loads, other) if row["event"] == "train"]
    assert [row["iteration"] for row in goes_on] == [5, 6, 7], "after a change of layout"
    assert goes_on[-1]["lm_loss"] < losses[0]

    written = (run / "metrics.jsonl").read_bytes()
    second = quickstart(copy)
    for what in ("environment", "corpus", "tokenizer", "token files", "training"):
        assert f"{what}: re-using" in second
    assert (run / "metrics.jsonl").read_bytes() == written
