"""The text that preprocess.py measures with: sources and manuals that every machine has.

Programs, headers and documentation of the running Python, its packages and the system, each text
once, in an order that mixes them, so that any part of the corpus is like the whole.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.data.bpe_training import train_byte_level_bpe
from megatron_lite.data.corpus import split_source
from megatron_lite.data.sentencepiece_training import train_sentencepiece

_SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".c", ".cpp", ".pm", ".pl", ".sh", ".js")
_SUFFIXES += (".md", ".rst", ".txt", ".html", ".json", ".gz")
_LARGEST = 1_000_000  # bytes of a file; larger ones are tables
_SYSTEM = ("/usr/share", "/usr/include", "/usr/lib")


@dataclass(frozen=True)
class Work:
    """What the contestants are given."""

    folder: Path
    full: Path
    """JSON lines {"text"}, for those who are fast."""
    part: Path
    """The beginning of it, for those who are not."""
    vocab_size: int

    @property
    def hf(self) -> Path:
        """The byte-level BPE."""
        return self.folder / "tokenizer.json"

    def sentencepiece(self, kind: str) -> Path:
        """The SentencePiece model of a kind."""
        return self.folder / f"{kind}.model"


def make_work(folder: Path, *, full: int, part: int, vocab_size: int, characters: int) -> Work:
    """Write a corpus of `full` and one of `part` bytes of text, and train the tokenizers."""
    work = Work(folder, folder / "full.jsonl", folder / "part.jsonl", vocab_size)
    written = 0
    with work.full.open("wb") as all_lines, work.part.open("wb") as first_lines:
        for text in _texts():
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            all_lines.write(line)
            if written < part:
                first_lines.write(line)
            written += len(text.encode())
            if written >= full:
                break
    if written < full:
        print(f"this machine has only {written / 1e6:.0f} MB of text; measured with that")
    given = {"vocab_size": vocab_size, "max_characters": characters}
    train_byte_level_bpe([str(work.full)], work.hf, **given)
    for kind in ("bpe", "unigram"):
        train_sentencepiece([str(work.full)], work.sentencepiece(kind), model_type=kind, **given)
    return work


def _texts() -> Iterator[str]:
    seen = set()
    for path in sorted(_paths(), key=lambda path: hashlib.sha256(path.encode()).digest()):
        try:
            data = Path(path).read_bytes()
            data = gzip.decompress(data) if path.endswith(".gz") else data
            text = data.decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            continue
        key = hashlib.sha256(data).digest()
        if key not in seen:
            seen.add(key)
            yield from (piece for piece in split_source(text) if piece.strip())


def _paths() -> Iterator[str]:
    own = (sysconfig.get_paths()[name] for name in ("purelib", "stdlib"))
    for root in dict.fromkeys((*own, *_SYSTEM)):
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                known = os.path.splitext(name)[1] in _SUFFIXES
                if known and os.path.isfile(path) and 0 < os.path.getsize(path) < _LARGEST:
                    yield path
