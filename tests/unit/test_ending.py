"""A signal asks a rank to save first, and what a launcher passes on is no second request."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron_lite import ending
from megatron_lite.ending import Ending
from megatron_lite.health import stopping
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.stopping import StopRequest
from megatron_lite.outcome import Outcome

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class Left(Exception):
    """The process would have ended."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ending:
    """The ending of a rank that trains."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(ending, "_leave", leave)
    Outcome(tmp_path, rank=0).write("running")
    own = Ending(Outcome(tmp_path, rank=0), StopRequest(), rank=0)
    own.stop.poll()
    own.stop.answered.set()  # nobody has to watch over the answer
    return own


def state(own: Ending) -> str:
    return own.outcome.read()["state"]


def test_the_same_request_by_way_of_the_launcher_is_no_second_one(
    own: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.signalled(signal.SIGINT)
    own.signalled(signal.SIGTERM)
    own.launcher_gone()
    assert own.stop.reason == "SIGINT" and state(own) == "running"
    monkeypatch.setattr(stopping, "SAME_REQUEST", 0.0)
    own.launcher_gone()
    with pytest.raises(Left, match="143"):
        own.signalled(signal.SIGTERM)
    assert state(own) == "failed"


def test_the_end_of_the_time_leaves_a_save_that_was_asked_for_before(
    own: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends USR1 before the limit, TERM at it and KILL half a minute later."""
    monkeypatch.setattr(stopping, "SAME_REQUEST", 0.0)
    own.stop.ask("SIGUSR1")
    own.stop.answered.set()
    own.signalled(signal.SIGTERM)
    own.stop.ask("SIGUSR1")
    assert own.stop.reason == "SIGTERM" and state(own) == "running"
    with pytest.raises(Left, match="143"):
        own.signalled(signal.SIGTERM)


def test_a_signal_right_behind_a_notice_is_a_request_of_its_own(own: Ending) -> None:
    """No launcher passes SIGUSR1 on as another one."""
    own.stop.ask("SIGUSR1")
    own.signalled(signal.SIGTERM)
    assert own.stop.reason == "SIGTERM" and state(own) == "running"


def test_a_lost_launcher_asks_for_a_checkpoint(own: Ending) -> None:
    own.launcher_gone()
    assert own.stop.reason == "the launcher is gone" and state(own) == "running"


def test_what_comes_after_the_agreed_end_changes_nothing(own: Ending) -> None:
    """A launcher sends SIGTERM to the others when the first rank leaves with 3."""
    own.outcome.write("requeue", iteration=5)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        own.settle()
        for number in SIGNALS:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    own.signalled(signal.SIGTERM)
    own.launcher_gone()
    own._stopped_by("SIGTERM", 143)  # it waited for an answer till now
    for late in (own.orphaned, lambda: own.failed(ValueError("closing"))):
        with pytest.raises(Left):
            late()
    assert state(own) == "requeue"


def test_a_rank_that_does_not_train_yet_ends_at_once(own: Ending) -> None:
    own.stop = StopRequest()
    with pytest.raises(Left, match="143"):
        own.signalled(signal.SIGTERM)
    assert state(own) == "failed"


def looks_on(own: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be answered after twenty looks, and is patient for ten."""
    looks = iter([False] * 20 + [True])
    monkeypatch.setattr(own.stop.answered, "wait", lambda _: next(looks))
    monkeypatch.setattr(stopping, "PATIENCE", 10 * ending._LOOK)


@pytest.mark.parametrize(
    ("phase", "first", "ends"),
    [
        ("forward-backward", 1, True),
        ("save", 1, False),
        ("loading", 1, False),
        ("replay", 1, False),
        ("forward-backward", 2, False),  # it compiles
    ],
)
def test_a_step_that_does_not_end_is_not_waited_for(
    phase: str, first: int, ends: bool, own: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what takes long by nature is."""
    beat = own.heartbeat = Heartbeat()
    beat.at("waiting for data", iteration=first)
    beat.at(phase, iteration=2)
    looks_on(own, monkeypatch)
    if ends:
        with pytest.raises(Left, match="143"):
            own._wait_for_the_answer("SIGTERM", 143)
    else:
        own._wait_for_the_answer("SIGTERM", 143)
    assert state(own) == ("failed" if ends else "running")


def test_a_long_save_is_not_waited_for_where_another_rank_has_ended_the_run(
    own: Ending, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own.heartbeat = Heartbeat()
    own.heartbeat.at("save")
    looks_on(own, monkeypatch)
    Outcome(own.outcome._run_dir, rank=1).end("failed", "no space left")
    with pytest.raises(Left, match="143"):
        own._wait_for_the_answer("SIGTERM", 143)
    assert "rank 0 stops because of rank 1: no space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "rank 3: no heartbeats"),
        ("no heartbeats", ""),
        ("no corpus", "rank 3 stops because of rank 0: no corpus"),
    ],
)
def test_a_rank_that_is_refused_before_the_ranks_have_met_says_so(
    told: str | None,
    said: str,
    own: Ending,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless rank 0 has."""
    monkeypatch.setattr(ending, "_RANK_0_FIRST", 0.0)
    if told is not None:
        own.outcome.end("refused", told)
    late = Ending(Outcome(own.outcome._run_dir, rank=3), own.stop, rank=3, world_size=4)
    with pytest.raises(Left, match="2"):
        late.refused(ValueError("no heartbeats"))
    assert capsys.readouterr().err.strip() == said
    status = own.outcome.read()
    assert status["error"] == (told or "no heartbeats") and status["state"] == "refused"
    assert status["rank"] == (3 if told is None else 0)


def test_the_version_of_a_status_tells_equal_ones_apart(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, rank=0)
    assert outcome.version() is None
    seen = []
    for _ in range(2):
        outcome.write("refused", error="the same")
        seen.append(outcome.version())
    outcome.repeat()
    assert len({*seen, outcome.version()}) == 3 and outcome.read()["error"] == "the same"


@pytest.mark.parametrize("old", ["failed", "refused", "requeue"])
def test_the_status_of_an_earlier_start_is_forgotten(old: str, tmp_path: Path) -> None:
    first, second = Outcome(tmp_path, rank=0), Outcome(tmp_path, rank=1)
    first.write(old, rank=1, error="long ago")
    second.forget()
    assert first.read()["state"] == old, "a rank may be late, and rank 0 have told something"
    first.forget()
    first.forget()
    assert first.version() is None
    assert second.end("failed", "now") and not first.end("failed", "because of it")
    assert first.read() == {"state": "failed", "rank": 1, "error": "now"}


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [n2]:1"), True),
        (RuntimeError("shapes differ"), None),
    ],
)
def test_a_peer_that_is_gone_on_another_machine_is_marked(
    own: Ending, error: RuntimeError, lost: bool | None
) -> None:
    with pytest.raises(Left, match="1"):
        own.failed(error)
    assert own.outcome.read().get("lost_peer") == lost


def test_a_full_disk_is_told_in_a_line_and_in_the_status(
    own: Ending, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new file can be written; the one that says "running" has room."""
    full = OSError(28, "No space left on device")

    def refuse(*_: object) -> None:
        raise full

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(Left, match="1"):
        own.failed(full)
    told = "writing what the run leaves: No space left on device; free some, or write elsewhere"
    assert own.outcome.read() == {"state": "failed", "rank": 0, "error": told}
    assert capsys.readouterr().err == f"rank 0 failed: {told}\n"
