"""One contestant of preprocess.py in a process of its own: `preprocess_work.py NAME CORPUS MODEL`.

It loads its tokenizer and all texts into memory, encodes them and prints a line of JSON: seconds of
the encoding alone, bytes of text, tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import orjson

BATCH = 2000  # texts a call, where a contestant's answer takes much memory
CORES = len(os.sched_getaffinity(0))
Contestant = Callable[[list[str]], int]
"""Encodes the texts and returns the number of tokens."""


def gigatoken(model: str) -> Contestant:
    """gigatoken on all cores, all texts in one call."""
    import awkward  # noqa: F401  (it loads that at its first answer)
    import gigatoken

    tokenizer = gigatoken.Tokenizer(model)
    return lambda texts: len(tokenizer.encode_batch(texts, parallel=True).layout.content.data)


def encode_batch_fast(model: str) -> Contestant:
    """The package tokenizers on all cores, its answers left where they are."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(model)

    def run(texts: list[str]) -> int:
        count = 0
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            found = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            count += sum(map(len, found))
        return count

    return run


def sentencepiece(model: str) -> Contestant:
    """SentencePiece on all cores, into arrays, which is its fastest way."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=model)
    return lambda texts: sum(
        map(len, processor.encode(texts, num_threads=CORES, return_type="numpy"))
    )


def datasets_map(model: str) -> Contestant:
    """datasets.map with two processes around tokenizers, as people preprocess with it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(model)

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in found]}

    def run(texts: list[str]) -> int:
        dataset = datasets.Dataset.from_dict({"text": texts})
        with tempfile.TemporaryDirectory() as folder:
            given: dict[str, Any] = {"batched": True, "num_proc": 2, "remove_columns": ["text"]}
            mapped = dataset.map(
                encode, load_from_cache_file=False, cache_file_name=f"{folder}/x.arrow", **given
            )
            return sum(len(c.values) for c in mapped.data.column("ids").chunks)

    return run


CONTESTANTS = {
    "gigatoken": gigatoken,
    "encode_batch_fast": encode_batch_fast,
    "sentencepiece bpe": sentencepiece,
    "sentencepiece unigram": sentencepiece,
    "datasets.map": datasets_map,
}


def main() -> None:
    """Load, encode, tell."""
    name, corpus, model = sys.argv[1:]
    with open(corpus, "rb") as file:
        texts = [orjson.loads(line)["text"] for line in file]
    size = sum(len(text.encode()) for text in texts)
    run = CONTESTANTS[name](model)
    started = time.perf_counter()
    tokens = run(texts)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "bytes": size, "tokens": tokens}))


if __name__ == "__main__":
    main()
