"""The texts that tokenizers are trained on: one field of any input that preprocessing reads.

Called by sentencepiece_training and bpe_training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def thinned_out(texts: Iterable[str], max_characters: int) -> list[str]:
    """Return evenly spaced texts of at most about max_characters together.

    Holds at most twice as much at a time, however many texts there are. DataError for less than one
    character.
    """
    if max_characters < 1:
        raise DataError(f"--max-characters {max_characters}: must be at least 1")
    kept: list[str] = []
    characters, step = 0, 1  # every step-th text is kept
    for number, text in enumerate(texts):
        if number % step == 0:
            kept.append(text)
            characters += len(text)
            while characters > 2 * max_characters and len(kept) > 1:
                kept, step = kept[::2], 2 * step
                characters = sum(map(len, kept))
    if characters <= max_characters:
        return kept
    wanted = max(1, len(kept) * max_characters // characters)
    return [kept[number * len(kept) // wanted] for number in range(wanted)]
