"""Our reader and writer against the safetensors library; every fault of a file is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from megatron_lite.checkpoint import tensor_file
from megatron_lite.checkpoint.assemble import cast
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.tensor_file import TensorReader, TensorWriter, stretches
from megatron_lite.sharding.placement import Box

SHAPES = {"vector": (7,), "matrix": (9, 13), "cube": (3, 4, 5), "scalar": (), "row": (1, 11)}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def path(arrays: dict[str, np.ndarray], tmp_path: Path) -> Path:
    save_file(arrays, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@given(data=st.data(), small=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_part_of_what_the_library_writes(
    data: st.DataObject, small: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[name]
    values = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    path = tmp_path_factory.mktemp("part") / "file.safetensors"
    save_file({"other": np.ones(5, np.float32), name: values}, path)
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True))
    part = Box(offset, size)
    with pytest.MonkeyPatch.context() as patch:
        if small:  # the ways of large tensors, on small ones
            patch.setattr(tensor_file, "STRETCH_BYTES", 64)
            patch.setattr(tensor_file, "_SHORT_RUN", 8)
        reader = TensorReader(path)
        np.testing.assert_array_equal(reader.read(name, part), values[part.slices()])
        reader.close()


def test_the_library_reads_what_is_written(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "written.safetensors"
    with TensorWriter(path, SHAPES, "F32") as writer:
        for values in arrays.values():
            for part in stretches(Box((0,) * values.ndim, values.shape), 4):
                writer.write(values[part.slices()])
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(SHAPES)
        for name, values in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), values)
    assert writer.bytes == path.stat().st_size
    with TensorWriter(tmp_path / "empty.safetensors", {}, "F32"):
        pass
    with safe_open(tmp_path / "empty.safetensors", framework="np") as file:
        assert not list(file.keys())


def test_a_file_is_as_long_as_announced(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="announced"),
        TensorWriter(tmp_path / "f", {"a": (4,)}, "F32") as writer,
    ):
        writer.write(np.zeros(3, np.float32))
    with (
        pytest.raises(TypeError, match="float64"),
        TensorWriter(tmp_path / "f", {"a": (4,)}, "F32") as writer,
    ):
        writer.write(np.zeros(4))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], "its tensors end at"),
        (lambda raw: raw + b"x", "its tensors end at"),
        (lambda raw: raw[:5], "is no whole safetensors file"),
        (lambda raw: b"", "is no whole safetensors file"),
        (lambda raw: b"\xff" * 8 + raw[8:], "too few for its header"),
        (lambda raw: raw[:8] + b"#" + raw[9:], "is no whole safetensors file"),
        (lambda raw: raw.replace(b'"F32"', b'"Q32"', 1), "Q32"),
        (lambda raw: raw.replace(b'"shape":[7]', b'"shape":[6]', 1), "tensor vector has"),
    ],
)
def test_damage_is_named(damage: object, told: str, path: Path) -> None:
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=told) as error:
        TensorReader(path)
    assert str(path) in str(error.value)


def test_what_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.safetensors: missing"):
        TensorReader(path.with_name("gone.safetensors"))
    reader = TensorReader(path)
    with pytest.raises(CheckpointError, match="holds no tensor wrong"):
        reader.read("wrong", Box((0,), (1,)))
    reader.close()


def test_header_of_a_writer_is_aligned(tmp_path: Path) -> None:
    for name in ("a", "ab", "abc"):
        with TensorWriter(tmp_path / "f", {name: (1,)}, "F32") as writer:
            writer.write(np.zeros(1, np.float32))
        raw = (tmp_path / "f").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        assert length % 8 == 0 and json.loads(raw[8 : 8 + length])[name]["shape"] == [1]


NUMBERS = [0.0, -0.0, 1.0, 1e-45, 3.4e38, -3.4e38, 65519.0, 65520.0, 1.00390625, 1.01171875]
SPECIAL = [*NUMBERS, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs(dtype: torch.dtype, tmp_path: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), dtype=torch.int32)
    values = torch.cat((torch.tensor(SPECIAL), bits.view(torch.float32)))
    ours = cast(values.numpy(), "float32", name)
    theirs = values.to(dtype)
    number = ~theirs.isnan().numpy()
    expected = theirs.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ours.view(np.uint16)[number], expected[number])
    back = torch.from_numpy(cast(ours, name, "float32"))
    assert torch.equal(back.isnan(), theirs.isnan())
    assert torch.equal(back[number], theirs.float()[number])
    save_torch({"x": theirs}, tmp_path / "f")
    reader = TensorReader(tmp_path / "f")
    read = reader.read("x", Box((0,), (len(values),)))
    assert torch.equal(torch.from_numpy(cast(read, name, "float32"))[number], back[number])
    reader.close()
