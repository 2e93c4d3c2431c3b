"""JSON lines → token ids of each requested field: the work of one preprocessing process.

No files and no processes here; the same chunk gives the same result anywhere. Called by preprocess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError
from megatron_lite.data.jsonl import Chunk, LineError, parse_record, replace_surrogates, text_field
from megatron_lite.data.tokenizer_base import Tokenizer

# Ends of sentences: . ! ? with closing quotes and white space, a full-width stop, a blank line.
_SENTENCE_END = re.compile("[.!?][\"')\\]]*\\s+|[\u3002\uff01\uff1f]\\s*|\\n\\s*\\n")


class _Text(NamedTuple):
    """One field of one record; sequences is None when the field is missing, empty when blank."""

    sequences: list[list[int]] | None
    surrogates: int


@dataclass
class FieldResult:
    """Documents of one field, each a list of sequence lengths over the joined `tokens`."""

    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    documents: list[list[int]] = field(default_factory=list)
    found: int = 0
    """Records that hold a text under the field."""
    empty: int = 0
    """Those of them without a token."""
    missing: int = 0
    """Records where the field is missing or null."""
    surrogates: int = 0
    """Lone surrogates replaced by U+FFFD."""

    def count(self, text: _Text) -> None:
        """Add one record to the counts and the documents."""
        if text.sequences is None:
            self.missing += 1
            return
        self.found += 1
        self.surrogates += text.surrogates
        if text.sequences:
            self.documents.append([len(sequence) for sequence in text.sequences])
        else:
            self.empty += 1


@dataclass
class ChunkResult:
    """What one chunk gave; `error` (file, line, reason) is set when the run must stop."""

    fields: dict[str, FieldResult]
    position: int
    """The chunk's position in its file, in bytes."""
    records: int = 0
    bad_lines: int = 0
    error: str | None = None


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentences that together are the text; knows nothing of abbreviations."""
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes chunks; the switches are those of tools/preprocess_data.py."""

    tokenizer: Tokenizer
    keys: Sequence[str]
    prepend_bos: bool = False
    append_eod: bool = False
    sentences: bool = False
    skip_bad_lines: bool = False
    skip_missing_keys: bool = False

    def __call__(self, chunk: Chunk) -> ChunkResult:
        """Encode every line of a chunk, or stop at the first bad one and set `error`."""
        result = ChunkResult({key: FieldResult() for key in self.keys}, chunk.position)
        tokens: dict[str, list[int]] = {key: [] for key in self.keys}
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            if not line.strip():
                continue
            try:
                texts = self._encode_line(line)
            except LineError as error:
                if self.skip_bad_lines:
                    result.bad_lines += 1
                    continue
                result.error = f"{chunk.path}: line {number}: {error}"
                break
            result.records += 1
            for key, text in texts.items():
                result.fields[key].count(text)
                for sequence in text.sequences or ():
                    tokens[key].extend(sequence)
        for key, values in tokens.items():
            result.fields[key].tokens = np.array(values, dtype=np.int64)
        return result

    def _encode_line(self, line: bytes) -> dict[str, _Text]:
        """Return the tokens of each field; LineError when the line is unusable as a whole."""
        record = parse_record(line)
        texts = {}
        for key in self.keys:
            text = text_field(record, key)
            if text is None and not self.skip_missing_keys:
                raise LineError(f"field {key!r} is {'null' if key in record else 'missing'}")
            if text is None:
                texts[key] = _Text(None, 0)
            else:
                text, surrogates = replace_surrogates(text)
                texts[key] = _Text(self._encode_text(text), surrogates)
        return texts

    def _encode_text(self, text: str) -> list[list[int]]:
        """Return the sequences of one document; none when the text is blank or has no tokens."""
        if not text.strip():
            return []
        parts = split_sentences(text) if self.sentences else [text]
        try:
            sequences = [tokens for part in parts if (tokens := self.tokenizer.tokenize(part))]
        except DataError as error:
            raise LineError(str(error)) from error
        if sequences and self.prepend_bos and self.tokenizer.bos is not None:
            sequences[0].insert(0, self.tokenizer.bos)
        if sequences and self.append_eod and self.tokenizer.eod is not None:
            sequences[-1].append(self.tokenizer.eod)
        return sequences
