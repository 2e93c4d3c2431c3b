"""Layers that are cut over a tensor group against plain torch, values and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.layers.embedding import VocabParallelEmbedding
from megatron_lite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_lite.layers.norm import Norm
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import Group, ProcessGroups
from megatron_lite.mpu.mappings import all_gather_first, all_reduce
from tests.distributed.ranks import on_ranks
from tests.logical import fill, gradient, logical_parts, random_values

TOKENS, INPUT, VOCAB, PADDED = 8, 12, 33, 48
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tensor_groups() -> list[Group]:
    """This rank's tensor groups on four ranks: of two, and of all four."""
    rank = dist.get_rank()
    pairs = ProcessGroups.create(Grid(tp_size=2, dp_size=2, rank=rank))
    return [pairs.tensor, ProcessGroups.create(Grid(tp_size=4, rank=rank)).tensor]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(tensor: Tensor, group: Group, cut: bool) -> Tensor:
    """This rank's tokens under sequence parallelism, else all."""
    return tensor.tensor_split(group.size)[group.rank] if cut else tensor


def columns_of(tensor: Tensor, group: Group) -> Tensor:
    return tensor.tensor_split(group.size, dim=-1)[group.rank]


def check_gradients(module: nn.Module, expected: dict[str, Tensor], group: Group) -> None:
    """Compare this rank's part of every gradient; partial ones are summed as the engine does."""
    for parameter in module.parameters():
        if parameter.partial_grad:
            all_reduce(gradient(parameter), group)
    for name, part in logical_parts(module, gradient).items():
        here = ~np.isnan(part)
        assert here.any()
        np.testing.assert_allclose(part[here], expected[name].numpy()[here], **CLOSE, err_msg=name)


def reference(
    values: dict[str, Tensor], function: Callable[..., Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of x and of each logical tensor, of `function(x, **values)` on whole
    tensors."""
    leaves = {name: v.clone().requires_grad_() for name, v in values.items()}
    x = x.clone().requires_grad_(x.is_floating_point())
    output = function(x, leaves)
    output.backward(grad)
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert grads.keys() == values.keys()
    return output.detach(), torch.empty(0) if x.grad is None else x.grad, grads


def check_column(group: Group, cut: bool) -> None:
    outputs = {"q": 16, "k": 8}
    layer = ColumnParallelLinear(
        LayerContext(group=group, sequence_parallel=cut), outputs, INPUT, bias=True, init=Init(1.0)
    )
    values = random_values(layer)
    fill(layer, values)
    x, grad = noise(TOKENS, INPUT, seed=1), noise(TOKENS, 24, seed=2)

    def plain(x: Tensor, at: dict[str, Tensor]) -> Tensor:
        return torch.cat([F.linear(x, at[f"{n}.weight"], at[f"{n}.bias"]) for n in outputs], dim=1)

    expected, expected_x, expected_grads = reference(values, plain, x, grad)
    fused = [columns_of(part, group) for part in expected.split((16, 8), dim=1)]
    own_grad = [columns_of(part, group) for part in grad.split((16, 8), dim=1)]
    leaf = rows_of(x, group, cut).clone().requires_grad_()
    output = layer(leaf)
    output.backward(torch.cat(own_grad, dim=1))
    torch.testing.assert_close(output.detach(), torch.cat(fused, dim=1), **CLOSE)
    torch.testing.assert_close(leaf.grad, rows_of(expected_x, group, cut), **CLOSE)
    check_gradients(layer, expected_grads, group)


def check_row(group: Group, cut: bool) -> None:
    context = LayerContext(group=group, sequence_parallel=cut)
    layer = RowParallelLinear(context, "o", 16, INPUT, bias=True, init=Init(1.0))
    assert layer.bias is not None
    assert layer.bias.partial_grad is cut
    values = random_values(layer)
    fill(layer, values)
    x, grad = noise(TOKENS, 16, seed=3), noise(TOKENS, INPUT, seed=4)

    def plain(x: Tensor, at: dict[str, Tensor]) -> Tensor:
        return F.linear(x, at["o.weight"], at["o.bias"])

    expected, expected_x, expected_grads = reference(values, plain, x, grad)
    leaf = columns_of(x, group).clone().requires_grad_()
    output = layer(leaf)
    output.backward(rows_of(grad, group, cut))
    torch.testing.assert_close(output.detach(), rows_of(expected, group, cut), **CLOSE)
    torch.testing.assert_close(leaf.grad, columns_of(expected_x, group), **CLOSE)
    check_gradients(layer, expected_grads, group)


def check_embedding(group: Group, cut: bool) -> None:
    """With four ranks the last one holds only padding, and tokens repeat."""
    layer = VocabParallelEmbedding(
        LayerContext(group=group), "e", VOCAB, INPUT, padded=PADDED, init=Init(1.0), scatter=cut
    )
    values = {"e": noise(VOCAB, INPUT, seed=5)}
    fill(layer, values)
    tokens = torch.tensor([0, 32, 11, 12, 32, 23, 24, 1])
    grad = noise(TOKENS, INPUT, seed=6)
    expected, _, expected_grads = reference(
        values, lambda t, at: F.embedding(t, at["e"]), tokens, grad
    )
    output = layer(tokens)
    output.backward(rows_of(grad, group, cut))
    torch.testing.assert_close(output.detach(), rows_of(expected, group, cut), **CLOSE)
    check_gradients(layer, expected_grads, group)
    held = sum(piece.box.size[0] for piece in layer.weight.placement.pieces())
    assert not gradient(layer.weight)[held:].any(), "padding has a gradient"


def check_norm(group: Group, cut: bool) -> None:
    layer = Norm(
        LayerContext(group=group), "n", INPUT, kind="LayerNorm", epsilon=1e-5, partial_grad=cut
    )
    values = random_values(layer)
    fill(layer, values)
    x, grad = noise(TOKENS, INPUT, seed=7), noise(TOKENS, INPUT, seed=8)

    def plain(x: Tensor, at: dict[str, Tensor]) -> Tensor:
        return F.layer_norm(x, (INPUT,), at["n.weight"], at["n.bias"])

    expected, _, expected_grads = reference(values, plain, x, grad)
    output = layer(rows_of(x, group, cut))
    output.backward(rows_of(grad, group, cut))
    torch.testing.assert_close(output.detach(), rows_of(expected, group, cut), **CLOSE)
    check_gradients(layer, expected_grads, group)


def check_layers() -> None:
    for group in [Group(), *tensor_groups()]:
        for cut in (False, True) if group.size > 1 else (False,):
            for check in (check_column, check_row, check_embedding, check_norm):
                check(group, cut)


def test_linear_embedding_and_norm_equal_plain_torch() -> None:
    on_ranks(4, check_layers)


def check_loss(group: Group, dtype: torch.dtype, spread: float) -> None:
    """Weights, padding columns full of rubbish, and on four ranks one that holds only padding."""
    logits = (spread * noise(TOKENS, PADDED, seed=9)).to(dtype)
    logits[:, VOCAB:] = 1e4
    targets = torch.tensor([0, 32, 11, 12, 32, 23, 24, 1])
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 1.0, 2.0])
    exact = logits[:, :VOCAB].double().requires_grad_()
    expected = (F.cross_entropy(exact, targets, reduction="none") * weights).sum()
    (7 * expected).backward()
    assert exact.grad is not None
    leaf = columns_of(logits, group).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1, targets, weights, vocab_size=VOCAB, group=group)
    (7 * loss).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-5, atol=0)
    everyone = torch.stack([g for g in all_gather_first(loss.detach()[None], group)])
    assert (everyone == loss.detach()).all(), "the ranks of a tensor group disagree on the loss"
    whole = torch.cat([exact.grad, torch.zeros(TOKENS, PADDED - VOCAB)], dim=1)
    rounding = max(torch.finfo(dtype).eps, 1e-4)
    torch.testing.assert_close(
        leaf.grad.double(), columns_of(whole, group), rtol=rounding, atol=1e-5
    )


def check_losses() -> None:
    for group in [Group(), *tensor_groups()]:
        check_loss(group, torch.float32, 3.0)
        check_loss(group, torch.float32, 1e3)
        check_loss(group, torch.bfloat16, 3.0)


def test_cross_entropy_equals_plain_torch() -> None:
    on_ranks(4, check_losses)
