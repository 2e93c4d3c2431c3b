"""What a preprocessing run read and wrote: counts, bad lines, lengths; text for a person.

Called by preprocess, which keeps it in the work folder as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_lite.data.encoding import BlockResult, FieldResult

_SHOWN = 10  # bad lines that are named; all are counted
_BAR = 40


@dataclass
class FieldCounts:
    """The counts of one field."""

    documents: int = 0
    tokens: int = 0
    found: int = 0
    """Records that hold a text under the field."""
    empty: int = 0
    """Those of them without a token."""
    missing: int = 0
    """Records where the field is missing or null."""
    surrogates: int = 0
    """Lone surrogates replaced by U+FFFD."""
    longest: int = 0
    """Tokens of the longest document."""
    histogram: list[int] = field(default_factory=lambda: [0] * 32)
    """Entry n counts the documents of 2^n to 2^(n+1) - 1 tokens."""

    def add(self, result: FieldResult) -> None:
        """Add what one block gave."""
        self.documents += len(result.sequences)
        self.tokens += len(result.tokens)
        self.found += result.found
        self.empty += result.empty
        self.missing += result.missing
        self.surrogates += result.surrogates
        if len(result.sequences):
            starts = np.cumsum(result.sequences) - result.sequences
            lengths = np.add.reduceat(result.lengths, starts, dtype=np.int64)
            self.longest = max(self.longest, int(lengths.max()))
            powers = np.frexp(lengths)[1] - 1  # exact: lengths lie far below 2^53
            found = np.bincount(powers, minlength=32)
            self.histogram = [a + int(b) for a, b in zip(self.histogram, found, strict=True)]

    def lengths(self) -> Iterator[str]:
        """Yield the histogram, a line for each power of two from the first to the last used."""
        used = [power for power, count in enumerate(self.histogram) if count]
        for power in range(used[0], used[-1] + 1) if used else ():
            count = self.histogram[power]
            bar = "#" * -(-_BAR * count // max(self.histogram))
            yield f"{1 << power:>12} to {(2 << power) - 1:>10} tokens {count:>12}  {bar}".rstrip()


@dataclass
class PreprocessReport:
    """The counts of a run, over all its starts."""

    records: int = 0
    bad_lines: int = 0
    bad_examples: list[str] = field(default_factory=list)
    """The first bad lines: file, line and fault."""
    disagreements: list[str] = field(default_factory=list)
    """Where the fast engine's tokens were not the tokenizer's."""
    engine: str = ""
    dtype: str = ""
    seconds: float = 0.0
    input_bytes: int = 0
    fields: dict[str, FieldCounts] = field(default_factory=dict)

    def copy(self) -> PreprocessReport:
        """Return a report that doesn't change with this one."""
        return replace(
            self,
            fields={key: replace(counts) for key, counts in self.fields.items()},
            bad_examples=list(self.bad_examples),
            disagreements=list(self.disagreements),
        )

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> PreprocessReport:
        """Return the report whose dataclasses.asdict this is."""
        fields = {key: FieldCounts(**counts) for key, counts in content["fields"].items()}
        return PreprocessReport(**{**content, "fields": fields})

    def add(self, result: BlockResult, lines_before: int) -> None:
        """Add what one block gave, which stands after so many lines of its file."""
        self.records += result.records
        self.bad_lines += len(result.bad)
        for number, fault in result.bad[: _SHOWN - len(self.bad_examples)]:
            self.bad_examples.append(located(result, lines_before, number, fault))
        if result.disagreement is not None:
            self.disagreements.append(located(result, lines_before, *result.disagreement))
        for key, part in result.fields.items():
            self.fields.setdefault(key, FieldCounts()).add(part)

    def lines(self, prefixes: Mapping[str, str]) -> Iterator[str]:
        """Yield the report, one fact group a line; `prefixes` are those of the outputs."""
        rate = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        yield (
            f"read {self.records} records, {self.input_bytes / 1e6:.1f} MB in "
            f"{self.seconds:.2f} s ({rate:.2f} MB/s); bad lines skipped: {self.bad_lines}"
        )
        yield from (f"  {line}" for line in self.bad_examples)
        if self.bad_lines > len(self.bad_examples):
            yield f"  … and {self.bad_lines - len(self.bad_examples)} more"
        yield f"engine: {self.engine}"
        for line in self.disagreements:
            yield f"  {line}; done again, and the rest as well, with the tokenizer itself"
        for key, part in self.fields.items():
            yield (
                f"{key}: {part.documents} documents, {part.tokens} tokens "
                f"({self.dtype}) in {prefixes[key]}.bin and .idx"
            )
            yield (
                f"{key}: empty documents dropped: {part.empty}; records without the field: "
                f"{part.missing}; lone surrogates replaced by U+FFFD: {part.surrogates}"
            )
            average = part.tokens / max(part.documents, 1)
            yield f"{key}: {average:.1f} tokens a document, the longest {part.longest}"
            yield from part.lengths()


def located(result: BlockResult, lines_before: int, number: int, fault: str) -> str:
    """Return a fault with its file and line."""
    return f"{result.place.path}: {result.place.unit} {lines_before + number}: {fault}"
