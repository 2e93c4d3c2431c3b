"""The texts that tokenizers are trained on: one field of any input that preprocessing reads.

Called by sentencepiece_training and bpe_training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lite.data.blocks import read_blocks, read_records
from megatron_lite.data.errors import DataError
from megatron_lite.data.inputs import find_sources
from megatron_lite.data.jsonl import LineError, replace_surrogates, text_field


def read_texts(inputs: Sequence[str], key: str) -> Iterator[str]:
    """Yield the texts under `key` of files, folders and globs; DataError for a bad record."""
    for index, source in enumerate(find_sources(inputs)):
        lines = 0
        for block in read_blocks(source, index, [key]):
            records, spanned = read_records(block.format, block.load())
            for number, content, _ in records:
                try:
                    if isinstance(content, LineError):
                        raise content
                    text = text_field(content, key)
                    if text is None:
                        raise LineError(f"field {key!r} is missing or null")
                except LineError as error:
                    place = f"{block.place.path}: {block.place.unit} {lines + number}"
                    raise DataError(f"{place}: {error}") from error
                yield replace_surrogates(text)[0]
            lines += spanned


def thinned_out(texts: list[str], max_characters: int) -> list[str]:
    """Return evenly spaced texts of at most about max_characters together."""
    total = sum(map(len, texts))
    if total <= max_characters:
        return texts
    wanted = max(1, len(texts) * max_characters // total)
    return [texts[number * len(texts) // wanted] for number in range(wanted)]
