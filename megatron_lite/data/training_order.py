"""Which training samples a run reads from where it stands, and what a change of the blend means.

Positions are kept per source, so that weights may change, and sources come and go, without a sample
being repeated or lost. Pure; called by build, resume and inspection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.resuming import data_differ
from megatron_lite.data.blended import Blend, BlendedDataset, source_names
from megatron_lite.data.errors import DataError
from megatron_lite.data.sampler import Ranges, joined, kept, training_batches


class Position(Protocol):
    """What is read and set of a run's progress."""

    data_start: int
    source_samples: dict[str, int]
    skip_samples: list[list[int]]

    @property
    def next_sample(self) -> int: ...


@dataclass(frozen=True)
class TrainingOrder:
    """The samples of a run by their number, which counts from the run's beginning."""

    dataset: BlendedDataset
    """Its sample 0 is number `data_start`."""
    data_start: int
    skip: Ranges

    @classmethod
    def of(cls, dataset: BlendedDataset, position: Position, skip: Ranges) -> TrainingOrder:
        """Return the order that goes on from a position; `skip` are numbers to leave out, beside
        the position's own.

        A position without counts of its sources is one of a run whose blend never changed.
        """
        if position.source_samples:
            samples = position.next_sample - position.data_start
            dataset = dataset.going_on(samples, position.source_samples)
        own = [(first, last) for first, last in position.skip_samples]
        return cls(dataset, position.data_start, joined([*skip, *own]))

    def batches(
        self, start: int, *, micro_batch_size: int, dp_rank: int, dp: int
    ) -> Iterator[list[int]]:
        """Yield the micro-batches of a rank from number `start` on, as numbers of the dataset."""
        shift = self.data_start
        batches = training_batches(
            start, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp=dp, skip=self.skip
        )
        return ([number - shift for number in batch] for batch in batches)

    def after(self, start: int, samples: int) -> int:
        """Return the number behind the last of `samples` samples that are read from `start` on."""
        return kept(start, samples - 1, self.skip) + 1

    def taken(self, number: int) -> dict[str, int]:
        """Return by name the samples that each source has given before number `number`."""
        return self.dataset.taken(number - self.data_start)


def in_other_data(
    position: Position, saved: Mapping[str, Any], now: Mapping[str, Any], choice: str
) -> list[str]:
    """Adapt a checkpoint's position to the data of another config; say what was done.

    `saved` and `now` are resolved configs, `choice` is checkpoint.changed_data. DataError as in
    `carry_on`.
    """
    if not data_differ(saved, now):
        return []
    if choice == "restart":
        position.data_start, position.source_samples = position.next_sample, {}
        position.skip_samples = []  # numbers from here on are those of other samples
        return [" other data: read from their beginning |"]
    return carry_on(position, *(training_blend(config["data"]) for config in (saved, now)))


def training_blend(data: Mapping[str, Any]) -> tuple[tuple[float, str], ...]:
    """Return (weight, prefix) of the training sources of a config's data section."""
    path = data["data_path"] if data["data_path"] is not None else data["train_data_path"]
    return tuple((weight, prefix) for weight, prefix in parse_blend(path) if weight > 0)


def carry_on(
    position: Position,
    before: Sequence[tuple[float, str]],
    now: Sequence[tuple[float, str]],
) -> list[str]:
    """Move a position from one blend, (weight, prefix) of each source, to another; say how.

    Sources are the same by their prefix: each goes on where it stands, in a mixture that begins
    here. Where all prefixes are new and the weights are the old ones, the data were moved, and
    nothing but the names changes. DataError where all is new.
    """
    if list(before) == list(now):
        return []
    old, new = (source_names([prefix for _, prefix in blend]) for blend in (before, now))
    samples = position.next_sample - position.data_start
    counts = Blend([weight for weight, _ in before]).counts(samples)
    stands = dict(zip(old, counts, strict=True)) | position.source_samples
    if set(old) & set(new):
        position.source_samples, position.data_start = stands, position.next_sample
        position.skip_samples = []  # numbers from here on are those of other samples
        going = " | ".join(f"{name}: {stands.get(name, 0)}" for name in new)
        return [f" other blend: each source goes on behind so many samples | {going} |"]
    if [weight for weight, _ in before] != [weight for weight, _ in now]:
        raise DataError(
            f"checkpoint.changed_data: none of the sources {', '.join(new)} is one of the "
            f"checkpoint's, {', '.join(old)}; change prefixes or weights, not both, or set it to "
            f'"restart"'
        )
    position.source_samples = {moved: stands[name] for name, moved in zip(old, new, strict=True)}
    return [f" moved data: {', '.join(new)} for {', '.join(old)} |"]
