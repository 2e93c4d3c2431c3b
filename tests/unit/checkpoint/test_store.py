"""Names, `latest`, commit, retention; and what a kill between any two of their acts leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError


def write(root: Path, step: int, text: str = "numbers", *, keep_last: int | None = None) -> None:
    store.sweep(root)
    folder = store.begin(root, step)
    (folder / "file").write_text(text)
    store.commit(folder, root, step, keep_last=keep_last)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_find_and_steps(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert store.find(root, step=None) is None and store.steps(root) == []
    for step in (2, 10, 4):
        write(root, step)
    assert store.steps(root) == [2, 4, 10]
    assert store.find(root, step=None) == root / "global_step4", "the one saved last"
    assert store.find(root, step=10) == root / "global_step10"
    assert store.older(root / "global_step10") == [root / "global_step4", root / "global_step2"]
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; steps there: 2, 4, 10"):
        store.find(root, step=3)
    shutil.rmtree(root / "global_step4")
    with pytest.raises(CheckpointError, match="names global_step4, which is not there"):
        store.find(root, step=None)


def test_retention(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep_last=2)
    assert names(tmp_path) == {"latest", "global_step3", "global_step4"}
    write(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == {"latest", "global_step2", "global_step3", "global_step4"}


class Killed(BaseException):
    """The program ends here."""


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the n-th change of names or deletion from now on not take place; returns a counter."""
    count = 0

    def counted(act: Callable[..., object]) -> Callable[..., object]:
        def instead(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                raise Killed
            return act(*args, **kwargs)

        return instead

    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    return lambda: count


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("step", [3, 4])
def test_a_kill_anywhere_leaves_a_whole_one(
    step: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a step is saved for the first time, or anew over one that is there."""
    for earlier in (1, 2, 3):
        write(tmp_path, earlier, f"step {earlier}")
    with monkeypatch.context() as patch:
        acts = kill_at(number, patch)
        try:
            write(tmp_path, step, "new", keep_last=2)
        except Killed:
            assert acts() == number
    store.recover(tmp_path)
    folder = store.find(tmp_path, step=None)
    assert folder is not None and folder.name in ("global_step3", "global_step4")
    assert (folder / "file").read_text() in ("step 3", "new")
    assert all((tmp_path / f"global_step{s}/file").is_file() for s in store.steps(tmp_path))
    write(tmp_path, 5, "after")
    assert (tmp_path / "latest").read_text() == "global_step5\n"
    assert not [name for name in names(tmp_path) if name.startswith(".")], "rests are gone"


def test_a_kill_before_the_first_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        kill_at(2, patch)
        with pytest.raises(Killed):
            write(tmp_path, 1)
    assert not (tmp_path / "latest").exists()
    assert store.find(tmp_path, step=None) == tmp_path / "global_step1"


def test_json_of_a_checkpoint(tmp_path: Path) -> None:
    for text, told in [("{", "damaged"), ("[]", "no JSON object")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=told):
            store.read_json(tmp_path, "config.json")
    with pytest.raises(CheckpointError, match="missing"):
        store.read_json(tmp_path, "origins.json")


def test_a_step_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    aside = tmp_path / ".global_step2.old"
    (tmp_path / "global_step2").rename(aside)
    assert store.steps(tmp_path) == [1, 2] and store.find(tmp_path, step=None) == aside
    assert store.find(tmp_path, step=2) == aside and aside.is_dir()
    assert store.older(aside) == [tmp_path / "global_step1"]


def test_names_that_are_no_step(tmp_path: Path) -> None:
    for name in ("global_step007", "global_step", "step5", "global_step5.tmp"):
        (tmp_path / name).mkdir()
    assert store.steps(tmp_path) == []


def test_candidates(tmp_path: Path) -> None:
    assert store.candidates(tmp_path, step=None, fall_back=True) == ([], [])
    for step in (1, 2, 3):
        write(tmp_path, step)
    one, two, three = (tmp_path / f"global_step{step}" for step in (1, 2, 3))
    assert store.candidates(tmp_path, step=None, fall_back=False) == ([three], [])
    assert store.candidates(tmp_path, step=None, fall_back=True) == ([three, two, one], [])
    assert store.candidates(tmp_path, step=2, fall_back=True) == ([two, one], [])
    for pointer in ("global_step9\n", "", "../elsewhere"):
        (tmp_path / "latest").write_text(pointer)
        folders, (line,) = store.candidates(tmp_path, step=None, fall_back=True)
        assert folders == [three, two, one] and "which is not there" in line
        with pytest.raises(CheckpointError, match="which is not there; steps there: 1, 2, 3"):
            store.candidates(tmp_path, step=None, fall_back=False)


def test_what_cant_be_deleted_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder: (_ for _ in ()).throw(OSError("not empty")))
        with pytest.warns(UserWarning, match="can't be deleted yet"):
            write(tmp_path, 2, keep_last=1)
    assert store.find(tmp_path, step=None) == tmp_path / "global_step2"
    assert store.steps(tmp_path) == [2]
    write(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == {"latest", "global_step3"}


def test_the_work_of_a_reshard_is_left(tmp_path: Path) -> None:
    kept = store.begin(tmp_path, 7)
    (kept / store.RESUMABLE).write_text("{}")
    left = store.begin(tmp_path, 8)
    write(tmp_path, 9)
    assert kept.is_dir() and not left.exists()
