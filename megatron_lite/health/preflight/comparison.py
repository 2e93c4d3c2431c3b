"""What is wrong with the facts of all ranks, taken together, in words. Called on rank 0.

A difference is told as what the few have against what the many have: of two halves the one with
rank 0 counts as the many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_lite.health.preflight.clocks import Skew
from megatron_lite.health.preflight.facts import Facts

LITTLE = 10**9
"""Free bytes below which a folder is told: logs, curves or compiled kernels may soon not fit."""
ASTRAY = 2.0
"""Seconds of clock skew that are told. Clocks that are kept differ by milliseconds; builds that go
by file times err at seconds, and at 5 minutes Slurm's munge refuses a node's credentials."""
SLOW = 2.0
"""A group that takes so many times the median of its like is told."""
NODES_NAMED = 4
NONE = "none"
"""Stands for the value of a rank that has none."""


@dataclass
class Findings:
    """What is wrong, a sentence each."""

    faults: list[str] = field(default_factory=list)
    """No run can go well with these."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """One all-reduce over one group, as one of its ranks or all of them saw it."""

    kind: str
    """Of the group, such as "tensor"."""
    ranks: tuple[int, ...]
    seconds: float
    gb_per_second: float
    """Bytes of the tensor / time, however often they cross the network."""
    correct: bool


def places(ranks: Iterable[int], nodes: Mapping[int, str]) -> str:
    """Ranks with their nodes: `rank 5 on node gpu7`, `ranks 0-7 on node gpu1 and …`."""
    by_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(nodes.get(rank, "unknown"), []).append(rank)
    named = [
        f"rank{'s' if len(held) > 1 else ''} {spans(held)} on node {node}"
        for node, held in by_node.items()
    ]
    if len(named) > NODES_NAMED:
        rest = len(named) - NODES_NAMED
        named = [*named[:NODES_NAMED], f"those of {rest} more node{'s' if rest > 1 else ''}"]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def spans(numbers: Sequence[int]) -> str:
    """`0-3, 8` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def compare(facts: Mapping[int, Facts]) -> Findings:
    """What differs between ranks that should not, and what ranks found by themselves."""
    nodes = {rank: fact.node for rank, fact in facts.items()}
    found = Findings(
        [*_differences({r: f.must_agree for r, f in facts.items()}, nodes), *_shared(facts, nodes)],
        list(_differences({r: f.should_agree for r, f in facts.items()}, nodes)),
    )
    found.faults += by_text({rank: fact.faults for rank, fact in facts.items()}, nodes)
    found.warnings += by_text({rank: fact.doubts for rank, fact in facts.items()}, nodes)
    found.warnings += by_text({rank: list(_short(fact)) for rank, fact in facts.items()}, nodes)
    return found


def by_text(texts: Mapping[int, Sequence[str]], nodes: Mapping[int, str]) -> list[str]:
    """What several ranks say alike, once, with those that say it."""
    said: dict[str, list[int]] = {}
    for rank, own in texts.items():
        for text in own:
            said.setdefault(text, []).append(rank)
    return [f"{places(ranks, nodes)}: {text}" for text, ranks in said.items()]


def _differences(
    values: Mapping[int, Mapping[str, str]], nodes: Mapping[int, str]
) -> Iterable[str]:
    names = dict.fromkeys(name for own in values.values() for name in own)
    for name in names:
        of_rank = {rank: values[rank].get(name, NONE) for rank in sorted(values)}
        counts = Counter(of_rank.values())
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: counts[value])  # the first rank's among equals
        for value in counts:
            if value != usual:
                ranks = [rank for rank, other in of_rank.items() if other == value]
                many = (
                    f"the {counts[usual]} others" if len(counts) == 2 else f"{counts[usual]} ranks"
                )
                yield f"{places(ranks, nodes)}: {name} is {value}, on {many} it is {usual}"


def _shared(facts: Mapping[int, Facts], nodes: Mapping[int, str]) -> Iterable[str]:
    """Devices that two ranks have taken."""
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, fact in facts.items():
        if fact.device:
            holders.setdefault((fact.node, fact.device), []).append(rank)
    for (_, device), ranks in holders.items():
        if len(ranks) > 1:
            local = ", ".join(str(facts[rank].local_rank) for rank in ranks)
            yield (
                f"{places(ranks, nodes)}: all use the GPU {device} (local ranks {local}); each "
                "process of a node needs a local rank and a GPU of its own"
            )


def _short(fact: Facts) -> Iterable[str]:
    for name, free in fact.free.items():
        if free < LITTLE:
            yield f"only {free / 1e9:.2f} GB are free in {name}"


def astray(skews: Mapping[int, Skew], nodes: Mapping[int, str]) -> list[str]:
    """A warning for each clock that is certainly too far from rank 0's."""
    return [
        f"{places([rank], nodes)}: the clock is {abs(skew.seconds):.1f} s "
        f"{'ahead of' if skew.seconds > 0 else 'behind'} that of {nodes[0]}, rank 0's node"
        for rank, skew in skews.items()
        if skew.at_least > ASTRAY
    ]


def whole_groups(readings: Iterable[Reading]) -> list[Reading]:
    """One reading a group, of its slowest rank, wrong if any rank's is; in the order of kinds."""
    groups: dict[tuple[str, tuple[int, ...]], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.kind, reading.ranks), []).append(reading)
    kinds = list(dict.fromkeys(kind for kind, _ in groups))
    merged = [
        Reading(
            kind,
            ranks,
            max(one.seconds for one in own),
            min(one.gb_per_second for one in own),
            all(one.correct for one in own),
        )
        for (kind, ranks), own in groups.items()
    ]
    return sorted(merged, key=lambda one: (kinds.index(one.kind), one.ranks))


def judge_groups(
    readings: Mapping[int, Sequence[Reading]], nodes: Mapping[int, str], *, jitter: float
) -> Findings:
    """Sums that are wrong, and groups far slower than others of their kind.

    Differences of `jitter` seconds are chance.
    """
    found = Findings()
    for rank, own in readings.items():
        for one in own:
            if not one.correct:
                found.faults.append(
                    f"{places([rank], nodes)}: the all-reduce over the {one.kind} group of "
                    f"{places(one.ranks, nodes)} gave a wrong sum"
                )
    whole = whole_groups(one for own in readings.values() for one in own)
    for kind in dict.fromkeys(one.kind for one in whole):
        like = [one for one in whole if one.kind == kind]
        usual = median(one.seconds for one in like)
        found.warnings += [
            f"{places(one.ranks, nodes)}: slow {kind} group, {one.gb_per_second:.2f} GB/s in an "
            f"all-reduce, {one.seconds / usual:.1f} times the median time of its like"
            for one in like
            if one.seconds > max(SLOW * usual, usual + jitter)
        ]
    return found
