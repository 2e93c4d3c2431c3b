"""The loss of one process against torch's: padding, weights, extreme logits, precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_lite.layers.cross_entropy import (
    LossKernels,
    loss_kernels,
    vocab_parallel_cross_entropy,
)
from megatron_lite.mpu.groups import Group


def ours(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    vocab: int,
    kernels: LossKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the logits of 3 × the loss."""
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        leaf * 1, targets, weights, vocab_size=vocab, group=Group(), kernels=kernels
    )
    (3 * loss).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def plain(logits: Tensor, targets: Tensor, weights: Tensor, *, vocab: int) -> tuple[Tensor, Tensor]:
    """The same in double precision, by torch's own function over the true columns."""
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf[:, :vocab], targets, reduction="none")
    loss = (losses * weights.double()).sum()
    (3 * loss).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def batch(tokens: int, padded: int, vocab: int, *, spread: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    logits = spread * torch.randn(tokens, padded, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return logits, targets, torch.rand(tokens, generator=generator)


def test_loss_and_gradient_equal_plain_torch() -> None:
    # 600 rows of 1,000 columns are more than one chunk of the work space.
    logits, targets, weights = batch(600, 1000, 1000)
    loss, grad = ours(logits, targets, weights, vocab=1000)
    expected, expected_grad = plain(logits, targets, weights, vocab=1000)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-7)


def test_masked_tokens_have_neither_loss_nor_gradient() -> None:
    logits, targets, weights = batch(6, 8, 8)
    weights[::2] = 0
    loss, grad = ours(logits, targets, weights, vocab=8)
    assert not grad[::2].any()
    assert grad[1::2].all()
    logits[::2] = 50.0
    assert torch.equal(ours(logits, targets, weights, vocab=8)[0], loss)


def test_no_token_at_all_is_a_loss_of_zero() -> None:
    logits, targets, weights = batch(4, 8, 8)
    loss, grad = ours(logits, targets, torch.zeros_like(weights), vocab=8)
    assert float(loss) == 0.0
    assert not grad.any()


@pytest.mark.parametrize("padding", [0.0, 1e4, -1e4, math.inf])
def test_padding_takes_no_part_whatever_is_in_it(padding: float) -> None:
    logits, targets, weights = batch(7, 40, 33)
    logits[:, 33:] = padding
    loss, grad = ours(logits, targets, weights, vocab=33)
    expected, expected_grad = plain(logits[:, :33], targets, weights, vocab=33)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad[:, :33].double(), expected_grad, rtol=1e-4, atol=1e-7)
    assert not grad[:, 33:].any()


def test_equal_logits_give_the_logarithm_of_the_true_vocabulary() -> None:
    ones = torch.ones(1)
    loss, _ = ours(torch.zeros(1, 40), torch.tensor([32]), ones, vocab=33)
    assert float(loss) == pytest.approx(math.log(33), rel=1e-6)


@pytest.mark.parametrize("spread", [1e3, 1e4])
def test_extreme_logits_stay_finite_and_right(spread: float) -> None:
    logits, targets, weights = batch(16, 32, 32, spread=spread)
    loss, grad = ours(logits, targets, weights, vocab=32)
    expected, expected_grad = plain(logits, targets, weights, vocab=32)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, targets, weights = batch(64, 1000, 1000)
    logits = logits.to(dtype)
    loss, grad = ours(logits, targets, weights, vocab=1000)
    assert loss.dtype == torch.float32
    expected, expected_grad = plain(logits, targets, weights, vocab=1000)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert grad.dtype == dtype
    # Only the stored gradient is rounded: half a unit in the last place.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rounding, atol=1e-6)


def test_compiled_kernels_equal_plain_torch() -> None:
    kernels = loss_kernels(compiled=True)
    dtype = torch.bfloat16
    for tokens in (64, 24):  # the second size is compiled for any size
        logits, targets, weights = batch(tokens, 1024, 1000)
        weights[::3] = 0
        logits = logits.to(dtype)
        loss, grad = ours(logits, targets, weights, vocab=1000, kernels=kernels)
        expected, expected_grad = plain(logits, targets, weights, vocab=1000)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(grad.double(), expected_grad, rtol=rounding, atol=1e-6)
        assert not grad[:, 1000:].any()
