"""One contestant of samples.py in a process of its own: `samples_work.py NAME PREFIX EPOCHS`.

Prints, as JSON, the seconds from opening the files to the first batch of every epoch, and the peak
of memory above what the imports took.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEQ_LENGTH, BATCH, SEED = 2048, 8, 1234
REMEDY = 'pip install --no-deps "megatron-core==0.16.1"'


def ours(prefix: str, epochs: int) -> Callable[[], None]:
    """This repository's samples; nothing is built, so the first batch of each epoch is read."""
    from megatron_lite.data.gpt_dataset import GPTDataset
    from megatron_lite.data.indexed_dataset import IndexedDataset

    def work() -> None:
        dataset = GPTDataset(IndexedDataset(prefix), seq_length=SEQ_LENGTH, seed=SEED)
        for epoch in range(epochs):
            first = dataset.stream.first_sample(epoch)
            assert all(len(dataset[first + k]) == SEQ_LENGTH + 1 for k in range(BATCH))

    return work


def theirs(prefix: str, epochs: int) -> Callable[[], None]:
    """megatron-core's three indices for the same number of samples, not written to a cache."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        from megatron.core.datasets import helpers_cpp
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split
    except ImportError as error:
        sys.exit(f"megatron-core is not there ({error}); it takes: {REMEDY}")
    import numpy as np

    assert helpers_cpp is not None
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache="",  # falsy, and no default: nothing is written
        tokenizer=Tokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def work() -> None:
        indexed = IndexedDataset(prefix, mmap=True)
        tokens = int(indexed.sequence_lengths.sum())
        documents = np.arange(len(indexed.sequence_lengths), dtype=np.int32)
        samples = (epochs * tokens - 1) // SEQ_LENGTH
        dataset = GPTDataset(indexed, prefix, documents, samples, Split.train, config)
        assert len(dataset) == samples
        assert all(len(dataset[k]["tokens"]) == SEQ_LENGTH for k in range(BATCH))

    return work


class Tokenizer:
    """What megatron-core's dataset asks of one."""

    eod, pad, vocab_size = 0, -1, 50_000
    unique_identifiers: dict[str, Any] = {"class": "none"}  # noqa: RUF012


def resident(name: str) -> int:
    """Bytes, by the kernel's name; not ru_maxrss, which begins with the parent's."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main() -> None:
    """Import first, then measure."""
    name, prefix, epochs = sys.argv[1:]
    work = {"ours": ours, "theirs": theirs}[name](prefix, int(epochs))
    before = resident("VmRSS")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "rss": resident("VmHWM") - before}))


if __name__ == "__main__":
    main()
