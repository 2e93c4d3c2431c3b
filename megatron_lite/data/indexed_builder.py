"""Writer of the .bin/.idx pair; the final names appear only when both files are whole.

Called by preprocess, by tests and by whoever merges files. Not safe for threads; a second process
that writes the same prefix is refused.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError
from megatron_lite.data.index_writer import write_index
from megatron_lite.data.indexed_dataset import DTYPES, bin_path, idx_path

SMALL_VOCABULARY = 65500  # Megatron's threshold: ids fit uint16, with room for added tokens


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 for vocabularies below 65,500 and int32 above."""
    return np.dtype("<u2") if vocab_size < SMALL_VOCABULARY else np.dtype("<i4")


class IndexedDatasetBuilder:
    """Collects documents; `finalize` publishes the pair, `abort` leaves nothing behind.

    As a context manager it aborts on any exception and whenever `finalize` was not called.
    Missing folders are created. DataError for an unknown dtype, a token outside its range, an
    unwritable folder and a prefix that another process is writing.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES or self.dtype.kind == "f":
            raise DataError(f"{prefix!s}: tokens can't be stored as {np.dtype(dtype).name}")
        self._partial = Path(f"{self.prefix}.bin.partial")
        self._partial_index = Path(f"{self.prefix}.idx.partial")
        try:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("ab")  # "ab": the lock comes before the truncation
        except OSError as error:
            raise DataError(f"{self._partial}: can't be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise DataError(
                f"{self._partial}: another process is writing this prefix; wait for it or choose "
                f"another output prefix"
            ) from error
        self._file.truncate(0)  # what an interrupted run left
        self._open = True
        self._lengths = array("i")
        self._documents = array("q", [0])

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    def add_document(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        sequence_lengths: Sequence[int] | None = None,
    ) -> None:
        """Append one document, in one sequence or cut into `sequence_lengths`.

        DataError for a token that the dtype can't hold, ValueError for lengths that don't add up.
        """
        values = np.asarray(tokens) if len(tokens) else np.empty(0, dtype=np.int64)
        limits = np.iinfo(self.dtype)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has a token outside "
                f"{limits.min} … {limits.max} ({self.dtype.name}); check the tokenizer's vocabulary"
            )
        lengths = [values.size] if sequence_lengths is None else list(sequence_lengths)
        if sum(lengths) != values.size:
            raise ValueError(f"sequence lengths add up to {sum(lengths)}, not {values.size}")
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))

    def finalize(self) -> None:
        """Sync both files and move them to their final names, the index last."""
        self._file.flush()
        os.fsync(self._file.fileno())
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        documents = np.frombuffer(self._documents, dtype=np.int64)
        sequences = documents[1:] - documents[:-1]
        with self._partial_index.open("wb") as file:
            write_index(file, self.dtype, lengths, sequences)
            file.flush()
            os.fsync(file.fileno())
        # An index of an older run must never stand beside the new tokens.
        idx_path(self.prefix).unlink(missing_ok=True)
        self._partial.replace(bin_path(self.prefix))
        self._partial_index.replace(idx_path(self.prefix))
        self._close()

    def abort(self) -> None:
        """Delete the temporary files; no effect after `finalize`."""
        if self._open:
            self._partial.unlink(missing_ok=True)
            self._partial_index.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self._file.close()  # releases the lock
        self._open = False
