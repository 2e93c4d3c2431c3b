"""A decoder in bare PyTorch: what someone writes in an afternoon, and the fastest peer.

The same network as the others' (RMSNorm, rotary positions, SwiGLU, tied embedding), so that they do
the same work. It uses nothing of megatron_lite.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from work import Shape


class Attention(nn.Module):
    """x [b, s, h] → [b, s, h], causal."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.channels = shape.heads, shape.hidden // shape.heads
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        fused = self.query_key_value(x).view(b, s, 3, self.heads, self.channels)
        query, key, value = (t.transpose(1, 2) for t in fused.unbind(2))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(out.transpose(1, 2).reshape(b, s, h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [b, n, s, d] in the half-split pairing; cos and sin are [s, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Norm, attention, residual; norm, SwiGLU, residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainGPT(nn.Module):
    """tokens and labels [b, s] → mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        channels = shape.hidden // shape.heads
        exponent = torch.arange(0, channels, 2).float() / channels
        angle = torch.outer(torch.arange(shape.seq_length).float(), 10000.0**-exponent)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
