"""megatron-core's own reader and writer judge our .bin/.idx.

Skipped where megatron-core is not installed (`pip install --no-deps megatron-core==0.16.1`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset

REPOSITORY = Path(__file__).resolve().parents[3]
CUTS = ([3], [1, 4], [2], [700, 300])
"""Sequence lengths of four documents."""


@pytest.fixture(scope="module")
def megatron_core() -> Any:
    """Their module of indexed data sets."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def _documents(dtype: type) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, np.iinfo(dtype).max, sum(cuts), dtype=dtype) for cuts in CUTS]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mapped", [True, False])
def test_megatron_core_reads_our_files(
    megatron_core: Any, tmp_path: Path, dtype: type, mapped: bool
) -> None:
    documents = _documents(dtype)
    with IndexedDatasetBuilder(tmp_path / "d", dtype) as builder:
        for document, cuts in zip(documents, CUTS, strict=True):
            builder.add_document(document, sequence_lengths=cuts)
        builder.finalize()
    theirs = megatron_core.IndexedDataset(str(tmp_path / "d"), mmap=mapped)
    assert theirs.index.dtype is dtype
    assert theirs.document_indices.tolist() == [0, 1, 3, 4, 6]
    assert theirs.sequence_lengths.tolist() == [length for cuts in CUTS for length in cuts]
    seen = np.concatenate([theirs[number] for number in range(len(theirs))])
    np.testing.assert_array_equal(seen, np.concatenate(documents))
    np.testing.assert_array_equal(theirs.get(5, offset=7, length=90), documents[3][707:797])


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_files_of_megatron_core(megatron_core: Any, tmp_path: Path, dtype: type) -> None:
    import torch

    documents = _documents(dtype)
    builder = megatron_core.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=dtype)
    for document, cuts in zip(documents, CUTS, strict=True):
        builder.add_document(torch.from_numpy(document.astype(np.int64)), cuts)
    builder.finalize(str(tmp_path / "d.idx"))
    ours = IndexedDataset(tmp_path / "d")
    assert ours.dtype == dtype and ours.num_documents == 4
    assert ours.document_lengths(0, 4).tolist() == [3, 5, 2, 1000]
    np.testing.assert_array_equal(ours.read(0, ours.num_tokens), np.concatenate(documents))


def test_the_benchmark_runs(megatron_core: Any, tmp_path: Path) -> None:
    """Its figures are worth nothing here; that it makes them, beside megatron-core, is."""
    command = [sys.executable, "tests/benchmarks/samples.py", "--quick", "--folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    measured = ("first_batch_s_1_epoch", "first_batch_s_3_epochs", "speedup_vs_megatron_core")
    assert all(facts[name] > 0 for name in (*measured, "peak_rss_mb", "megatron_core_s_3_epochs"))
    assert list(tmp_path.iterdir()) == []
