"""What a run reads over resumes, layouts, left-out samples and changes of its blend."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.blended import BlendedDataset
from megatron_lite.data.errors import DataError
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.training_order import TrainingOrder, carry_on, training_blend
from megatron_lite.progress import Progress

Mix = Sequence[tuple[float, str]]
Read = list[tuple[str, int]]
"""(source, sample number inside it) in the order of the run's numbers."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GPTDataset]:
    """Three sources by prefix; what they hold does not matter here."""
    from megatron_lite.data.indexed_builder import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for name in "abc":
        with IndexedDatasetBuilder(folder / name, "<u2") as builder:
            builder.add_document(range(100))
            builder.finalize()
        indexed = IndexedDataset(folder / name)
        indexed.prefix = name
        found[name] = GPTDataset(indexed, seq_length=8, seed=0)
    return found


def _steps(
    sources: dict[str, GPTDataset],
    mix: Mix,
    progress: Progress,
    count: int,
    *,
    dp: int = 1,
    micro: int = 2,
    skip: Sequence[tuple[int, int]] = (),
) -> Read:
    """Train `count` steps of 8 samples, as build and trainer do; returns what was read."""
    dataset = BlendedDataset([sources[name] for _, name in mix], [weight for weight, _ in mix])
    order = TrainingOrder.of(dataset, progress, skip)
    ranks = [
        order.batches(progress.next_sample, micro_batch_size=micro, dp_rank=rank, dp=dp)
        for rank in range(dp)
    ]
    read: Read = []
    for _ in range(count):
        # Micro-batch i of all ranks lies side by side.
        for _ in range(8 // (micro * dp)):
            for rank in ranks:
                for number in next(rank):
                    source, sample = order.dataset.locate(number)
                    read.append((order.dataset.names[source], sample))
        before = progress.next_sample
        left_out = order.after(before, 8) - before - 8
        progress.advance(samples=8, left_out=left_out, applied=True)
        progress.source_samples |= order.taken(progress.next_sample)
    return read


def _again(progress: Progress) -> Progress:
    """The position as a checkpoint gives it back."""
    return Progress(**json.loads(json.dumps(vars(progress))))


MIX: Mix = ((0.5, "a"), (0.3, "b"), (0.2, "c"))


@pytest.mark.parametrize(("dp", "micro"), [(1, 2), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("skip", [(), ((3, 10), (9, 12), (40, 41))])
def test_every_layout_and_every_resume_reads_the_same(
    sources: dict[str, GPTDataset], dp: int, micro: int, skip: Sequence[tuple[int, int]]
) -> None:
    expected = _steps(sources, MIX, Progress(), 12, skip=skip)
    progress, read = Progress(), []
    for steps in (1, 4, 7):
        progress = _again(progress)
        read += _steps(sources, MIX, progress, steps, dp=dp, micro=micro, skip=skip)
    assert read == expected
    assert progress.consumed_samples == 96 and progress.left_out_samples == (10 if skip else 0)
    assert sum(progress.source_samples.values()) == progress.next_sample


@settings(max_examples=30, deadline=None)
@given(
    mixes=st.lists(
        st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 5), min_size=1), max_size=6
    ),
    steps=st.integers(1, 9),
)
def test_a_changed_blend_repeats_and_loses_nothing(
    sources: dict[str, GPTDataset], mixes: list[dict[str, float]], steps: int
) -> None:
    """Weights change, sources leave and come back: each source counts 0, 1, 2, … all the same."""
    progress, mix = Progress(), MIX
    read = _steps(sources, mix, progress, steps)
    for weights in mixes:
        now = [(weight, name) for name, weight in weights.items()]
        if not {name for _, name in mix} & {name for _, name in now}:
            continue  # refused, see below
        progress = _again(progress)
        carry_on(progress, mix, now)
        part = _steps(sources, now, progress, steps)
        _check_shares(part, now)
        read, mix = read + part, now
    numbers = defaultdict(list)
    for source, number in read:
        numbers[source].append(number)
    assert all(found == list(range(len(found))) for found in numbers.values())
    counts = {name: count for name, count in progress.source_samples.items() if count}
    assert counts == {name: len(found) for name, found in numbers.items()}


def _check_shares(part: Read, mix: Mix) -> None:
    """The bounds of B10 hold from the change on."""
    total = sum(weight for weight, _ in mix)
    for weight, name in mix:
        count = sum(source == name for source, _ in part)
        assert abs(count - weight / total * len(part)) <= (1 if len(mix) <= 2 else 2)


def test_the_same_blend_goes_on_as_if_nothing_had_been_said(
    sources: dict[str, GPTDataset],
) -> None:
    expected = _steps(sources, MIX, Progress(), 6)
    progress = Progress()
    read = _steps(sources, MIX, progress, 3)
    assert carry_on(progress, MIX, MIX) == []
    assert read + _steps(sources, MIX, progress, 3) == expected


def test_moved_data_go_on_under_their_new_names(sources: dict[str, GPTDataset]) -> None:
    expected = _steps(sources, MIX, Progress(), 6)
    progress = Progress()
    before = [(weight, f"/old/{name}") for weight, name in MIX]
    read = _steps({f"/old/{name}": s for name, s in sources.items()}, before, progress, 3)
    # The test's sources carry their own names whatever they are called.
    progress.source_samples = {f"/old/{n}": c for n, c in progress.source_samples.items()}
    assert "moved" in carry_on(progress, before, MIX)[0]
    assert read + _steps(sources, MIX, progress, 3) == expected
    with pytest.raises(DataError, match=r"none of the sources x, y is one .* a, b, c"):
        carry_on(progress, MIX, [(1.0, "x"), (2.0, "y")])


def test_a_checkpoint_without_counts_goes_on_too(sources: dict[str, GPTDataset]) -> None:
    """Of an earlier version, or converted: the counts follow from its blend."""
    expected = _steps(sources, MIX, Progress(), 6)
    bare = Progress(iteration=3, consumed_samples=24)
    assert _steps(sources, MIX, bare, 3) == expected[24:]
    bare = Progress(iteration=3, consumed_samples=24)
    (line,) = carry_on(bare, MIX, [(1.0, "b"), (1.0, "d")])
    assert line == " other blend: each source goes on behind so many samples | b: 7 | d: 0 |"
    assert bare.source_samples == {"a": 12, "b": 7, "c": 5} and bare.data_start == 24


def test_ranges_that_were_passed_do_nothing(sources: dict[str, GPTDataset]) -> None:
    progress = Progress()
    read = _steps(sources, MIX, progress, 2)
    read += _steps(sources, MIX, _again(progress), 2, skip=[(0, 16)])
    assert read == _steps(sources, MIX, Progress(), 4)


def test_left_out_samples_are_those_of_the_numbers(sources: dict[str, GPTDataset]) -> None:
    whole = _steps(sources, MIX, Progress(), 5)
    skipped = _steps(sources, MIX, Progress(), 4, skip=[(5, 9), (20, 22)])
    kept = [
        read for number, read in enumerate(whole) if not (5 <= number < 9 or number in (20, 21))
    ]
    assert skipped == kept[:32]


def test_the_training_sources_of_a_section() -> None:
    section = {"data_path": [2, "a", 0, "b", 1, "c"], "train_data_path": None}
    assert training_blend(section) == ((2.0, "a"), (1.0, "c"))
    assert training_blend({"data_path": None, "train_data_path": "d"}) == ((1.0, "d"),)


def test_numbers_count_from_the_beginning_of_the_run(sources: dict[str, GPTDataset]) -> None:
    """A blend that began at number 100 is read from its sample 0 there."""
    dataset = BlendedDataset([sources["a"]], [1.0])
    progress = Progress(consumed_samples=90, left_out_samples=10, data_start=100)
    order = TrainingOrder.of(dataset, progress, [(102, 104)])
    batches = order.batches(100, micro_batch_size=2, dp_rank=0, dp=1)
    assert list(islice(batches, 2)) == [[0, 1], [4, 5]]
    assert order.after(100, 4) == 106 and order.taken(106) == {"a": 6}


def test_what_a_rewind_left_out_is_left_out_beside_what_the_config_says(
    sources: dict[str, GPTDataset],
) -> None:
    dataset = BlendedDataset([sources["a"]], [1.0])
    position = Progress(skip_samples=[[4, 6], [9, 10]])
    order = TrainingOrder.of(dataset, position, [(1, 2), (5, 7)])
    batches = order.batches(0, micro_batch_size=6, dp_rank=0, dp=1)
    assert next(batches) == [0, 2, 3, 7, 8, 10]
    assert order.after(0, 6) == 11


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ([(1.0, "a")], True),
        ([(1.0, "moved")], True),
        ([(0.5, "a"), (0.5, "b")], False),
    ],
)
def test_what_a_rewind_left_out_means_nothing_in_another_blend(
    now: list[tuple[float, str]], *, kept: bool
) -> None:
    position = Progress(iteration=2, consumed_samples=8, skip_samples=[[12, 16]])
    carry_on(position, [(1.0, "a")], now)
    assert position.skip_samples == ([[12, 16]] if kept else [])
