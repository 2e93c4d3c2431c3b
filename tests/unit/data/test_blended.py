"""How sample numbers are dealt to weighted sources."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.blended import Blend, BlendedDataset
from megatron_lite.data.errors import DataError
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset

WriteDocuments = Callable[..., IndexedDataset]


def _counts(weights: list[float], samples: int) -> list[int]:
    """Deal samples, check that each source counts 0, 1, 2, …, and return the counts."""
    blend = Blend(weights)
    counts = [0] * len(weights)
    for sample in range(samples):
        source, number = blend.locate(sample)
        assert number == counts[source]
        counts[source] += 1
    return counts


def test_b10_counts() -> None:
    assert _counts([0.001, 0.999], 1000) == [1, 999]
    few = _counts([0.001, 0.999], 150)
    assert few in ([0, 150], [1, 149])
    assert _counts([0.5, 0.3, 0.2], 1000) == [500, 300, 200]


def test_b10_weights_are_relative() -> None:
    pairs: list[tuple[list[float], list[float]]] = [
        ([1, 3], [0.25, 0.75]),
        ([0.1, 0.3], [1, 3]),
        ([5, 3, 2], [0.5, 0.3, 0.2]),
    ]
    for one, other in pairs:
        a, b = Blend(one), Blend(other)
        assert [a.locate(k) for k in range(400)] == [b.locate(k) for k in range(400)]
    assert _counts([1, 3], 100) == [25, 75]


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9))
def test_b10_counts_never_stray(weights: list[float]) -> None:
    blend = Blend(weights)
    share = np.array(blend.weights)
    counts = np.zeros(len(weights))
    for sample in range(300):
        counts[blend.locate(sample)[0]] += 1
        worst = np.abs(counts - share * (sample + 1)).max()
        assert worst <= (1 if len(weights) <= 2 else 2)


def test_b10_the_bound_holds_far_out() -> None:
    blend = Blend([0.7, 0.2, 0.05, 0.05])
    far = 10**15 + 7
    numbers: dict[int, int] = {}
    for sample in range(far, far + 200):
        source, number = blend.locate(sample)
        assert number == numbers.get(source, number - 1) + 1
        numbers[source] = number
        assert abs(number - blend.weights[source] * sample) <= 3
    assert len(numbers) == 4


@pytest.mark.parametrize("weights", [[-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1]])
def test_b10_impossible_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="blend weight"):
        Blend(weights)


def test_b10_a_zero_weight_is_never_read() -> None:
    blend = Blend([1, 0, 1])
    assert {blend.locate(sample)[0] for sample in range(100)} == {0, 2}


def test_b10_an_exhausted_source_starts_again(write_documents: WriteDocuments) -> None:
    sources = [
        GPTDataset(
            write_documents([range(base, base + 401)], name=f"c{base}"), seq_length=4, seed=0
        )
        for base in (0, 1000)
    ]
    blended = BlendedDataset(sources, [0.001, 0.999])
    samples = [blended[sample] for sample in range(250)]
    assert blended.samples_per_epoch == 200
    assert sum(int(sample[0] >= 1000) for sample in samples) == 250
    firsts = [int(sample[0]) for sample in samples]
    assert len(set(firsts[:100])) == 100  # all of one epoch, then the next one
    assert set(range(1000, 1400)) <= set(np.concatenate([s[:-1] for s in samples]).tolist())


def test_sources_must_fit_together(write_documents: WriteDocuments) -> None:
    indexed = write_documents([range(100)])
    short, long = (GPTDataset(indexed, seq_length=s, seed=0) for s in (4, 8))
    with pytest.raises(ValueError, match="same seq_length"):
        BlendedDataset([short, long], [1, 1])
    with pytest.raises(ValueError, match="1 sources but 2 weights"):
        BlendedDataset([short], [1, 1])
