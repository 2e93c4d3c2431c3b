"""Which files each kind of tokenizer reads. Constants alone, for the rules and for data/."""

from __future__ import annotations

from types import MappingProxyType

FILE_KEYS = ("tokenizer_model", "vocab_file", "merge_file")
"""The fields that name a tokenizer's files."""
TOKENIZER_FILES = MappingProxyType(
    {
        "SentencePieceTokenizer": ("tokenizer_model",),
        "HFTokenizer": ("tokenizer_model",),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "ByteTokenizer": (),
        "NullTokenizer": (),
    }
)
