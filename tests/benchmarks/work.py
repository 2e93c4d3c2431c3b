"""The work that all contestants of train_step.py do: shapes, batch, optimizer settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder with RMSNorm, rotary positions, SwiGLU and a tied embedding, and its batch."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int = 32_000
    seq_length: int = 512
    micro_batch_size: int = 4

    @property
    def parameters(self) -> int:
        """Weights of the whole model, norms included, the tied table once."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch_size * self.seq_length

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for the command line of a contestant's process."""
        return asdict(self)


SHAPES = {
    "30m": Shape(hidden=512, layers=4, heads=8, ffn=1344),
    "125m": Shape(hidden=768, layers=12, heads=12, ffn=2048),
}
QUICK = {
    "30m": Shape(hidden=128, layers=2, heads=4, ffn=320, vocab=4096, seq_length=128),
    "125m": Shape(hidden=192, layers=3, heads=6, ffn=512, vocab=4096, seq_length=128),
}
"""The same program in seconds; its numbers say nothing about speed."""

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
CLIP = 1.0
