"""Collectives with a gradient against arithmetic in one process, on two grids at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.mpu import mappings
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import DeepSpeedMpu, Group, ProcessGroups
from tests.distributed.ranks import on_ranks

ROWS, COLUMNS = 4, 8
"""Shape of the whole tensors; both divide by 4."""


def everyones(group: Group, *shape: int, salt: int) -> list[Tensor]:
    """A tensor for each rank of a group, known to all of them; whole numbers, so sums are exact."""
    found = []
    for rank in group.ranks:
        generator = torch.Generator().manual_seed(100 * rank + salt)
        found.append(torch.randint(-9, 10, shape, generator=generator).double())
    return found


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def rows(tensor: Tensor, group: Group) -> Tensor:
    return tensor.tensor_split(group.size, dim=0)[group.rank]


def columns(tensor: Tensor, group: Group) -> Tensor:
    return tensor.tensor_split(group.size, dim=1)[group.rank]


def beside(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=1)


def check(
    mapping: Callable[[Tensor, Group], Tensor],
    group: Group,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    forward: Callable[[list[Tensor]], Tensor],
    backward: Callable[[list[Tensor]], Tensor],
) -> None:
    """Apply `mapping` to this rank's input of shape `shapes[0]`; compare the output, and what
    becomes of this rank's output gradient of shape `shapes[1]`.

    `forward` and `backward` compute this rank's part from the inputs and gradients of all ranks.
    """
    inputs = everyones(group, *shapes[0], salt=1)
    gradients = everyones(group, *shapes[1], salt=2)
    leaf = inputs[group.rank].clone().requires_grad_()
    mine = gradients[group.rank].clone()
    output = mapping(leaf * 1.0, group)
    output.backward(mine)
    torch.testing.assert_close(output.detach(), forward(inputs), rtol=0, atol=0)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, backward(gradients), rtol=0, atol=0)
    assert torch.equal(mine, gradients[group.rank]), "the caller's gradient was overwritten"


def check_all(group: Group) -> None:
    """Every mapping on one group."""
    whole, part = (ROWS, COLUMNS), (ROWS, COLUMNS // group.size)
    few = (ROWS // group.size, COLUMNS)

    def own(tensors: list[Tensor]) -> Tensor:
        return tensors[group.rank]

    def run(
        mapping: Callable[[Tensor, Group], Tensor],
        shapes: tuple[tuple[int, int], tuple[int, int]],
        forward: Callable[[list[Tensor]], Tensor],
        backward: Callable[[list[Tensor]], Tensor],
    ) -> None:
        check(mapping, group, shapes, forward, backward)

    run(mappings.copy_to_tensor_region, (whole, whole), own, total)
    run(mappings.reduce_from_tensor_region, (whole, whole), total, own)
    run(mappings.scatter_to_tensor_region, (whole, part), lambda x: columns(own(x), group), beside)
    run(mappings.gather_from_tensor_region, (part, whole), beside, lambda g: columns(own(g), group))
    run(mappings.scatter_to_sequence_region, (whole, few), lambda x: rows(own(x), group), torch.cat)
    run(
        mappings.gather_from_sequence_region,
        (few, whole),
        torch.cat,
        lambda g: rows(total(g), group),
    )
    run(
        mappings.reduce_scatter_to_sequence_region,
        (whole, few),
        lambda x: rows(total(x), group),
        torch.cat,
    )


def mappings_on_two_grids() -> dict[str, list[int]]:
    """Four ranks as tp 2 × dp 2 and as tp 4 and as tp 2 × pp 2, used in turn."""
    rank = dist.get_rank()
    square = ProcessGroups.create(Grid(tp_size=2, dp_size=2, rank=rank))
    line = ProcessGroups.create(Grid(tp_size=4, rank=rank))
    deep = ProcessGroups.create(Grid(tp_size=2, pp_size=2, rank=rank))
    for group in (square.tensor, line.tensor, square.data, deep.model, deep.embedding):
        check_all(group)
    check_all(square.pipeline)  # one rank: nothing is sent, the input comes back
    return {
        "square tensor": list(square.tensor.ranks),
        "square data": list(square.data.ranks),
        "line tensor": list(line.tensor.ranks),
        "deep pipeline": list(deep.pipeline.ranks),
        "deep model": list(deep.model.ranks),
        "deepspeed model": mpu_sums(DeepSpeedMpu(deep)),
        "deepspeed data": mpu_sums(DeepSpeedMpu(square)),
    }


def mpu_sums(mpu: DeepSpeedMpu) -> list[int]:
    """World size, rank and sum of ranks + 1 over DeepSpeed's two groups."""
    found = []
    for kind in ("data", "model"):
        ranks = torch.tensor(dist.get_rank() + 1)
        dist.all_reduce(ranks, group=getattr(mpu, f"get_{kind}_parallel_group")())
        found += [
            getattr(mpu, f"get_{kind}_parallel_world_size")(),
            getattr(mpu, f"get_{kind}_parallel_rank")(),
            int(ranks),
        ]
    return found


def test_mappings_on_two_grids_in_one_process() -> None:
    found = on_ranks(4, mappings_on_two_grids)
    assert found[3] == {
        "square tensor": [2, 3],
        "square data": [1, 3],
        "line tensor": [0, 1, 2, 3],
        "deep pipeline": [1, 3],
        "deep model": [0, 1, 2, 3],
        "deepspeed model": [1, 0, 4, 4, 3, 10],
        "deepspeed data": [2, 1, 6, 2, 1, 7],
    }
    assert [f["square data"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def embedding_holders() -> tuple[int, ...]:
    return ProcessGroups.create(Grid(pp_size=3, rank=dist.get_rank())).embedding.ranks


def test_the_middle_of_a_pipeline_holds_no_embedding() -> None:
    assert on_ranks(3, embedding_holders) == [(0, 2), (1,), (0, 2)]


def test_a_lone_process_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    groups = ProcessGroups.single()
    x = torch.ones(2, 2)
    assert mappings.reduce_from_tensor_region(x, groups.tensor) is x
    assert mappings.gather_from_sequence_region(x, groups.tensor) is x
