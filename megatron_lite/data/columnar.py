"""Blocks of Parquet and Arrow files and of data sets saved by the package `datasets`.

A block travels as an Arrow stream of the requested columns. Needs pyarrow; imported by blocks when
such an input turns up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.data.blocks import Block, Place, Record
from megatron_lite.data.errors import DataError
from megatron_lite.data.inputs import Source
from megatron_lite.data.jsonl import LineError

try:
    import pyarrow as pa
    import pyarrow.ipc as ipc
    import pyarrow.parquet as parquet
except ImportError as error:
    raise DataError(
        "Parquet and Arrow files are read by pyarrow, which is not installed: "
        "pip install 'megatron_lite[columns]'"
    ) from error

_FILE_MAGIC = b"ARROW1"  # of an Arrow file; a stream has none
_ROWS = 1024  # a step where nothing tells how large rows are
_Part = tuple[pa.RecordBatch, float]
"""A batch, and which part of the file lies before its end."""


def column_blocks(source: Source, index: int, keys: Sequence[str], *, size: int) -> Iterator[Block]:
    """Yield a file's rows in blocks of about `size` bytes; DataError where it can't be read."""
    read = {"parquet": _parquet, "arrow": _arrow, "dataset": _dataset}[source.format]
    rows = number = 0
    try:
        for batch, done in read(source.path, keys, size):
            step = max(1, batch.num_rows * size // max(batch.nbytes, 1))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step)
                rows += part.num_rows
                place = Place(source.path, index, number, int(source.size * done), "record")
                yield Block(place, source.format, _packed(part))
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: can't be read as {source.format} after record {rows}: {error}"
        ) from error


def table_records(data: bytes) -> tuple[Iterator[Record], int]:
    """Return the rows of a block as records, and their number."""
    with ipc.open_stream(pa.py_buffer(data)) as reader:
        table = reader.read_all()
    return _rows(table), table.num_rows


def _rows(table: pa.Table) -> Iterator[Record]:
    names = table.column_names
    columns = [_values(table.column(name)) for name in names]
    for number in range(table.num_rows):
        values = [column[number] for column in columns]
        faults = [value for value in values if isinstance(value, LineError)]
        content = faults[0] if faults else dict(zip(names, values, strict=True))
        yield number + 1, content, True


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values; a text that isn't UTF-8 becomes the error that says so."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return LineError(f"invalid UTF-8 at byte {error.start + 1} of a text")


def _packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def _chosen(batch: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Return the requested columns; without any, one that only says how many rows there are."""
    names = [key for key in keys if key in batch.schema.names]
    if names:
        return batch.select(names)
    return pa.RecordBatch.from_arrays([pa.nulls(batch.num_rows)], names=[""])


def _parquet(path: str, keys: Sequence[str], size: int) -> Iterator[_Part]:
    """Yield the batches of a Parquet file; pages are read as they come."""
    rows = 0
    with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        facts = file.metadata
        columns = [key for key in keys if key in file.schema_arrow.names]
        for group in range(facts.num_row_groups):
            row_group = facts.row_group(group)
            fitting = row_group.num_rows * size // max(row_group.total_byte_size, 1)
            step = min(max(fitting, 1), 1 << 16)
            for batch in file.iter_batches(step, row_groups=[group], columns=columns):
                rows += batch.num_rows
                yield _chosen(batch, keys), rows / facts.num_rows


def _arrow(path: str, keys: Sequence[str], size: int) -> Iterator[_Part]:
    """Yield the batches of an Arrow file or stream."""
    with Path(path).open("rb") as file:
        is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    with pa.memory_map(path) as mapped:
        if is_file:
            with ipc.open_file(mapped) as reader:
                for number in range(reader.num_record_batches):
                    done = (number + 1) / reader.num_record_batches
                    yield _chosen(reader.get_batch(number), keys), done
        else:
            with ipc.open_stream(mapped) as reader:
                for batch in reader:
                    yield _chosen(batch, keys), mapped.tell() / mapped.size()


def _dataset(path: str, keys: Sequence[str], size: int) -> Iterator[_Part]:
    """Yield the batches of a data set."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: a data set saved by the package datasets, which is not installed: "
            f"pip install 'megatron_lite[columns]'"
        ) from error
    dataset = datasets.load_from_disk(path).with_format("arrow")
    rows = 0
    for table in dataset.iter(batch_size=_ROWS):
        for batch in table.to_batches():
            rows += batch.num_rows
            yield _chosen(batch, keys), rows / len(dataset)
