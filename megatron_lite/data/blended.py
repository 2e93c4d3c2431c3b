"""Several sources mixed by weight: k → (source, number inside it), with nothing stored.

Pure arithmetic plus one lookup. A source that runs out goes on into its next epoch, because a
GPTDataset has no end. Called by build.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError
from megatron_lite.data.source import CorpusSource


@dataclass(frozen=True)
class _Split:
    """An inner node: of t samples, floor(share · t + 1/2) go left."""

    numerator: int
    denominator: int
    left: _Split | int
    right: _Split | int

    def left_count(self, samples: int) -> int:
        return (2 * self.numerator * samples + self.denominator) // (2 * self.denominator)


class Blend:
    """The exact rule that deals sample numbers to sources in proportion to `weights`.

    The sources are leaves of a Huffman tree; each node deals its samples to two branches with
    rounding, so a count never strays by more than 1/2 for two sources. Along a path every share
    but the last is at most 2/3 (light branches are merged first), so for any number of sources a
    count stays within (1 + 1 + 2/3 + 4/9 + …) / 2 = 2 of weight times samples. Weights are taken as
    the decimal numbers they were written as and need not add up to one; 1 : 3 is 0.25 : 0.75. A
    source of weight 0 gets nothing. DataError for negative, non-finite or all-zero weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not math.isfinite(weight) or weight < 0:
                raise DataError(f"blend weight {weight}: must be a finite number of 0 or more")
        exact = [Fraction(repr(float(weight))) for weight in weights]
        total = sum(exact)
        if not total:
            raise DataError(f"blend weights {list(weights)}: at least one must be above 0")
        self.weights = [float(weight / total) for weight in exact]
        heap: list[tuple[Fraction, int, _Split | int]] = [
            (weight, source, source) for source, weight in enumerate(exact) if weight
        ]
        heapq.heapify(heap)
        ties = len(exact)  # makes the order of equal weights definite
        while len(heap) > 1:
            light, _, right = heapq.heappop(heap)
            heavy, _, left = heapq.heappop(heap)
            share = heavy / (heavy + light)
            node = _Split(share.numerator, share.denominator, left, right)
            heapq.heappush(heap, (heavy + light, ties, node))
            ties += 1
        self._root = heap[0][2]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source, sample number inside it) of a blended sample number."""
        if sample < 0:
            raise IndexError(f"sample numbers start at 0, got {sample}")
        node = self._root
        while isinstance(node, _Split):
            before = node.left_count(sample)
            if node.left_count(sample + 1) > before:
                node, sample = node.left, before
            else:
                node, sample = node.right, sample - before
        return node, sample

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each source gives."""
        counts = [0] * len(self.weights)
        parts = [(self._root, samples)]
        while parts:
            node, share = parts.pop()
            if isinstance(node, _Split):
                left = node.left_count(share)
                parts += [(node.left, left), (node.right, share - left)]
            else:
                counts[node] = share
        return counts


def source_names(prefixes: Sequence[str]) -> list[str]:
    """Return a name for each source: its prefix, with a number where that comes again.

    >>> source_names(["code", "prose", "code"])
    ['code', 'prose', 'code #2']
    """
    found: list[str] = []
    for position, prefix in enumerate(prefixes):
        times = prefixes[:position].count(prefix)
        found.append(f"{prefix} #{times + 1}" if times else prefix)
    return found


class BlendedDataset:
    """`dataset[k]` comes from the source that the blend names; see `Blend` for the bounds.

    All sources share one seq_length. `given` counts the samples that each source gave before sample
    0, null: none. ValueError when the numbers of sources and weights differ.
    """

    def __init__(
        self,
        datasets: Sequence[CorpusSource],
        weights: Sequence[float],
        given: Sequence[int] | None = None,
    ) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} sources but {len(weights)} weights")
        self.blend = Blend(weights)
        self._weights = list(weights)
        self.datasets = list(datasets)
        self.names = source_names([dataset.indexed.prefix for dataset in datasets])
        self._given = list(given or [0] * len(datasets))
        self.seq_length = datasets[0].seq_length
        if any(dataset.seq_length != self.seq_length for dataset in datasets):
            raise ValueError("the sources of a blend must have the same seq_length")

    @property
    def _read(self) -> list[CorpusSource]:
        pairs = zip(self.datasets, self.blend.weights, strict=True)
        return [dataset for dataset, weight in pairs if weight]

    @property
    def samples_per_epoch(self) -> int:
        """Sum over the sources with a weight, so "once through" is exact only in total."""
        return sum(dataset.samples_per_epoch for dataset in self._read)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sources with a weight."""
        return sum(dataset.num_tokens for dataset in self._read)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return blended sample `sample`, see SampleSource."""
        source, number = self.locate(sample)
        return self.datasets[source][number]

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (source, sample number inside it) of a blended sample number."""
        source, number = self.blend.locate(sample)
        return source, self._given[source] + number

    def taken(self, samples: int) -> dict[str, int]:
        """Return by name the samples that each source has given before blended sample `samples`."""
        pairs = zip(self._given, self.blend.counts(samples), strict=True)
        return dict(zip(self.names, map(sum, pairs), strict=True))

    def going_on(self, samples: int, taken: Mapping[str, int]) -> BlendedDataset:
        """Return the same blend in which before sample `samples` each source has given `taken`.

        A source that is not named has given nothing.
        """
        counts = self.blend.counts(samples)
        given = [taken.get(name, 0) - count for name, count in zip(self.names, counts, strict=True)]
        return BlendedDataset(self.datasets, self._weights, given)
