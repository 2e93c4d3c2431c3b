"""What counts as movement, and what happens where there is none; in C code as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from megatron_lite.health import observation, stacks, watchdog
from megatron_lite.health.examination import Examination
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.watchdog import Watchdog

ROOT = Path(__file__).parents[3]


@pytest.fixture
def dog(tmp_path: Path) -> Watchdog:
    return Watchdog(Heartbeat(), stacks.create(tmp_path, 3), pulse_seconds=1.0)


def in_training(dog: Watchdog) -> Heartbeat:
    """Past the first iteration."""
    beat = dog._heartbeat
    for iteration in (1, 2):
        beat.at("forward-backward", iteration=iteration)
    dog.beat(1.0)
    return beat


def test_stillness_ends_with_the_next_change(dog: Watchdog) -> None:
    beat = in_training(dog)
    for expected in (1.0, 2.0):
        dog.beat(1.0)
        assert dog.still == expected
    beat.doing("the next action")
    dog.beat(1.0)
    assert dog.still == 0.0


@pytest.mark.parametrize(
    ("phase", "iteration", "moves"),
    [
        ("loading", 2, True),
        ("save", 2, True),
        ("forward-backward", 1, True),  # the first one of this start compiles
        ("forward-backward", 2, False),
        ("waiting for data", 2, False),
    ],
)
def test_work_is_movement_where_a_process_works_alone(
    phase: str, iteration: int, moves: bool, dog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = dog._heartbeat
    beat.at("waiting for data", iteration=1)
    beat.at(phase, iteration=iteration)
    work = [0.0, 0]
    monkeypatch.setattr(watchdog, "own_work", lambda: (work[0], work[1]))
    dog.beat(10.0)
    for change in ((2.5, 0), (0.0, 11_000_000)):
        work = [work[0] + change[0], work[1] + change[1]]
        dog.beat(10.0)
        assert (dog.still == 0.0) == moves
    work = [work[0] + 1.0, work[1] + 1_000_000]
    dog.beat(10.0)
    assert dog.still >= 10.0, "the threads that watch do as much by themselves"


def test_stacks_are_written_once_and_again_after_movement(dog: Watchdog, tmp_path: Path) -> None:
    beat = in_training(dog)
    path = stacks.path_of(tmp_path, 3)
    dog.beat(59.0)
    assert path.read_text() == ""
    dog.beat(2.0)
    dog.beat(2.0)
    assert path.read_text().count("nothing has moved for 61 s") == 1
    assert "forward-backward of iteration 2" in path.read_text()
    assert "test_stacks_are_written_once" in path.read_text()
    beat.doing("something")
    dog.beat(1.0)
    dog.beat(60.0)
    assert path.read_text().count("===") == 2


def test_stacks_that_cant_be_written_end_no_watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        dog = Watchdog(Heartbeat(), full, pulse_seconds=1.0)
        beat = in_training(dog)
        for _ in range(2):
            dog.beat(61.0)
            assert dog.still == 61.0
            beat.doing("something")
            dog.beat(1.0)
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        with open(os.devnull, "w") as nowhere:  # so that the file can be closed
            os.dup2(nowhere.fileno(), full.fileno())
    assert capsys.readouterr().err.count("stacks can't be written: [Errno 28]") == 1


def test_the_limit_calls_and_calls_again_where_others_move(
    dog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dog, "_set_timer", lambda: None)
    in_training(dog)
    called = Event()
    dog.arm(30.0, called.set)
    dog.beat(29.0)
    assert dog._acting is None
    for _ in range(2):
        dog.beat(1.0)
        assert called.wait(5)
        called.clear()
        assert dog._acting is not None
        dog._acting.join()


IN_C_CODE = """
import ctypes, sys
from pathlib import Path
from megatron_lite.health import stacks, watchdog
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.processes import birth
from megatron_lite.health.record import Facts, RecordFile
import os, socket, time

watchdog.GRACE = 3.0
run_dir, pid = Path(sys.argv[1]), os.getpid()
facts = Facts(rank=0, world_size=1, host=socket.gethostname(), pid=pid, born=birth(pid),
              pulse_seconds=0.1)
beat = Heartbeat(RecordFile(run_dir, facts))
file = stacks.create(run_dir, 0)
stacks.answer(file)
dog = watchdog.Watchdog(beat, file, pulse_seconds=0.1)
dog.arm(2.0, lambda: None)
dog.start()
beat.at("optimizer step", iteration=4)
time.sleep(0.5)
print("ready", flush=True)
# PyDLL keeps Python's lock; nobody ever writes.
ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


def test_a_rank_that_holds_pythons_lock_in_c_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of it can run, and no handler: it is named all the same, gives its stacks when it
    is asked, and comes to its end."""
    monkeypatch.setattr(observation, "FROZEN_AFTER", 1.0)
    command = [sys.executable, "-c", IN_C_CODE, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            examination = Examination.of(tmp_path, moves_within=30)
            told = "\n".join(examination.lines(all_ranks=False))
            assert not examination.well
            assert "no heartbeat beats" in told and "rank 0 on" in told
            assert "optimizer step of iteration 4" in told
            assert 'File "<string>", line ' in "\n".join(examination.stack_lines(ask=True))
            assert process.wait(timeout=20) == 1
        finally:
            process.send_signal(signal.SIGKILL)
    assert "Timeout" in stacks.path_of(tmp_path, 0).read_text()


class Turns:
    """An event that ends a loop after some turns."""

    def __init__(self, count: int) -> None:
        self.count = count

    def wait(self, seconds: float) -> bool:
        self.count -= 1
        return self.count < 0


def test_a_process_that_was_stopped_did_not_stand_still(
    dog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hour that SIGSTOP, or a lid that was shut, took does not count."""
    in_training(dog)
    clock = iter([0.0, 1.0, 3601.0, 3602.0])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dog, "_end", Turns(3))
    monkeypatch.setattr(dog, "_set_timer", lambda: None)
    dog._watch()
    assert dog.still == 4.0
