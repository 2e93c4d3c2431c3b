"""What the entry point does before training is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite import train
from megatron_lite.health.stopping import StopRequest


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests share a process, whose signals are others' affair."""
    monkeypatch.setattr(StopRequest, "listen", lambda *_: None)


@pytest.fixture
def config(small_run: dict[str, Any], tmp_path: Path) -> Path:
    """A run whose corpus is there."""
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    return path


def test_variables_of_the_config_are_set(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch.environment is there when the session begins; what the user set stays."""
    seen: dict[str, str] = {}

    def run(*_: object, **__: object) -> int:
        seen.update(os.environ)
        return 0

    monkeypatch.setitem(sys.modules, "megatron_lite.session", SimpleNamespace(run=run))
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_DEBUG": "TRACE"})
    values = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "ODD": "$HOME; 64(x2)\n", "NOTHING": ""}
    setting = f"launch.environment={json.dumps(values)}"
    words = [str(config), "--run-dir", str(config.parent / "run"), "--set", setting]
    assert train.main(words) == 0
    assert {name: seen[name] for name in values} == values | {"NCCL_DEBUG": "TRACE"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('["A"]', "must be an object of names and texts, not a list"),
        ('{"A": 1}', "must be an object of names and texts; A is a number"),
        ('{"A B": "x"}', "A B is no name of a variable"),
    ],
)
def test_variables_must_be_names_and_texts(
    value: str, told: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([str(config), "--set", f"launch.environment={value}", "--validate-only"]) == 2
    said = capsys.readouterr().err
    assert "launch.environment = " in said and told in said


def test_the_launchers_above_a_process() -> None:
    """Under deepspeed the parent is itself a child of the command that was called."""
    me, parent = os.getpid(), os.getppid()
    assert train.lineage({}) == []
    assert train.lineage({"TORCHELASTIC_RUN_ID": "x"}) == [me, parent]
    assert train.lineage({"MEGATRON_LITE_NODE": "x"}) == [me, parent]
    status = Path(f"/proc/{parent}/status").read_text()
    above = int(status.partition("PPid:")[2].split()[0])
    assert train.lineage({"CROSS_RANK": "0"}) == [me, parent, above]


def start(*words: object, path: Path = Path()) -> subprocess.Popen[bytes]:
    """The program, which finds modules in `path` first."""
    repository = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_lite.train", *map(str, words)],
        env=os.environ | {"PYTHONPATH": f"{path.absolute()}:{repository}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_reader_of_the_config_that_leaves(config: Path) -> None:
    """As `… --validate-only | head`."""
    shown = start(config, "--validate-only")
    assert shown.stdout is not None and shown.stderr is not None
    shown.stdout.close()
    assert shown.stderr.read() == b"" and shown.wait(timeout=60) == 1
    shown.stderr.close()


def test_an_interrupt_while_torch_is_imported(config: Path, tmp_path: Path) -> None:
    stub = tmp_path / "modules/torch.py"
    stub.parent.mkdir()
    stub.write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)")
    run = start(config, "--run-dir", tmp_path / "run", path=stub.parent)
    assert run.communicate(timeout=60) == (b"", b"")
    assert run.returncode == -signal.SIGINT


def test_a_run_folder_that_is_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(config), "--run-dir", str(config)]) == 2
    assert capsys.readouterr().err == f"--run-dir {config}: is there already, and is no folder\n"


def test_two_runs_do_not_share_a_folder(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    status = run_dir / "status.json"
    status.write_text("the first one's")
    words = [str(config), "--run-dir", str(run_dir)]
    patient = train.occupy
    monkeypatch.setattr(train, "occupy", lambda folder: patient(folder, patience=0.1))
    monkeypatch.setattr(train, "start", lambda *_, **__: 0)
    code = f"""
import time
from pathlib import Path
from megatron_lite.occupancy import occupy
held = occupy(Path({str(run_dir)!r}))
print(flush=True)
time.sleep(60)
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdout=subprocess.PIPE,
    )
    try:
        assert first.stdout is not None and first.stdout.readline()
        assert train.main(words) == 2
        said = capsys.readouterr().err
        assert f"{run_dir}: process {first.pid} on " in said and "another --run-dir" in said
        assert train.main([*words, "--set", "training.train_iters=0"]) == 2
        assert status.read_text() == "the first one's"
    finally:
        first.kill()
        first.communicate()
    assert train.main(words) == 0
    assert train.main(words) == 0, "the folder was held by a run that is over"
    (run_dir / ".lock").write_text("process 1 on another machine\n")
    assert train.main(words) == 0
