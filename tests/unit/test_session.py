"""Which GPU a rank takes."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.session import Refused, gpu_of


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [(8, 3, 3), (1, 3, 0), (1, 0, 0)],  # with --gpus-per-task=1 a task sees its own alone
)
def test_the_gpu_of_a_rank(
    visible: int, local_rank: int, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert gpu_of(local_rank) == gpu


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Refused, match="number 2 of its node sees 2 GPUs: start as many ranks"):
        gpu_of(2)
