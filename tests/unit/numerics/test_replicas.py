"""Hashes of bits in their order, and the verdict on who is off."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.numerics import replicas
from megatron_lite.numerics.replicas import content_hash, drift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_element_and_its_place_count(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replicas._BLOCK, "cpu", 16)  # several blocks, the last one not full
    values = torch.randn(5, 9).to(dtype)
    found = {int(content_hash(values))}
    for place in range(values.numel()):
        other = values.clone()
        bits = other.view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[place] += 1
        found.add(int(content_hash(other)))
    found.add(int(content_hash(values.flip(0))))
    found.add(int(content_hash(values[[0, 1, 2, 4, 3]])))
    assert len(found) == 1 + values.numel() + 2
    assert int(content_hash(values.clone())) in found


def test_what_is_not_contiguous_or_has_no_dimension() -> None:
    values = torch.randn(4, 6)
    assert int(content_hash(values.t())) == int(content_hash(values.t().contiguous()))
    assert int(content_hash(torch.tensor(0.0))) != int(content_hash(torch.tensor(-0.0)))


def test_the_verdict() -> None:
    assert drift("w", {0: 5, 1: 5}) is None
    one = drift("w", {0: 5, 1: 5, 2: 6})
    assert one is not None and (one.agreeing, one.others) == ((0, 1), (2,))
    said = one.describe({0: "a", 1: "a", 2: "b"})
    assert said == "w: rank 2 on b holds another value than rank 0, 1"
    nobody = drift("w", {0: 5, 1: 6})
    assert nobody is not None and (nobody.agreeing, nobody.others) == ((), (0, 1))
    said = nobody.describe({0: "a", 1: "b"})
    assert said == "w: ranks 0 on a, 1 on b hold different values, none of them a majority"
