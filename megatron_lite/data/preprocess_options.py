"""The settings of a preprocessing run, and what identifies the run when it is resumed.

Filled by tools/preprocess_data.py, used by preprocess.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.data.blocks import BLOCK_BYTES
from megatron_lite.data.engine import Engine
from megatron_lite.data.errors import DataError
from megatron_lite.data.inputs import Source, find_sources
from megatron_lite.data.tokenizer import named_tokenizer
from megatron_lite.data.tokenizer_base import STATING_FILES, Tokenizer


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of tools/preprocess_data.py, and two settings that tests make small."""

    input: Sequence[str]
    output_prefix: str
    tokenizer_type: str
    json_keys: Sequence[str] = ("text",)
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tokenizer_engine: str = "auto"
    check_every: int = 2000
    """Of this many documents one is encoded by the tokenizer too, where the engine isn't it."""
    input_format: str = "auto"
    text_documents: str = "file"
    append_eod: bool = False
    prepend_bos: bool = False
    split_sentences: bool = False
    workers: int = 1
    log_interval: int = 10_000
    skip_bad_lines: bool = False
    skip_missing_keys: bool = False
    restart: bool = False
    block_bytes: int = BLOCK_BYTES
    """Input that a worker takes at a time: small blocks cost calls, large ones leave the cache."""
    commit_seconds: float = 10.0
    """Work of at most about so long is lost when the run is killed."""

    def check(self) -> None:
        """Raise DataError for settings that make no sense."""
        if self.workers < 1:
            raise DataError(f"--workers {self.workers}: must be at least 1")
        if self.check_every < 1:
            raise DataError(f"--check-every {self.check_every}: must be at least 1")
        if self.vocab_size is not None and self.tokenizer_type != "NullTokenizer":
            raise DataError(f"--vocab-size {self.vocab_size}: is for NullTokenizer; leave it out")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise DataError(f"--json-keys {' '.join(self.json_keys)}: a field is named twice")

    def sources(self) -> list[Source]:
        """Return the input files in order; DataError where there are none."""
        return find_sources(
            self.input, format=self.input_format, text_documents=self.text_documents
        )

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; DataError when it lacks a requested special token."""
        tokenizer = named_tokenizer(self, vocab_size=self.vocab_size)
        tokenizer.require(bos=self.prepend_bos, eod=self.append_eod)
        return tokenizer

    def prefixes(self) -> dict[str, str]:
        """Return the output prefix of each field."""
        level = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output_prefix}_{key}_{level}" for key in self.json_keys}

    def work_folder(self) -> str:
        """Return where the work lies until it is whole."""
        return f"{self.output_prefix}.preprocess"

    def identity(
        self, sources: Sequence[Source], tokenizer: Tokenizer, engine: Engine
    ) -> dict[str, Any]:
        """Return all that the output depends on, for a run that goes on with this one's work."""
        same = "tokenizer_type prepend_bos append_eod split_sentences skip_bad_lines"
        same += " skip_missing_keys check_every"
        identity = {name.replace("_", " "): getattr(self, name) for name in same.split()}
        identity |= {"json keys": list(self.json_keys), "engine": engine.name}
        identity["block bytes"] = self.block_bytes
        identity |= {"vocabulary": tokenizer.vocab_size, "tokenizer files": self._tokenizer_files()}
        for number, source in enumerate(sources, start=1):
            identity[f"input {number}"] = (
                f"{os.path.abspath(source.path)} ({source.format}, {source.size} bytes, changed "
                f"at {source.modified / 1e9:.6f})"
            )
        return identity

    def _tokenizer_files(self) -> str:
        """Return a hash of the files that make the tokenizer, in order."""
        files = [Path(given or "") for given in (self.vocab_file, self.merge_file)]
        model = Path(self.tokenizer_model or "")
        folder = model if model.is_dir() else model.parent
        files += [model, *(folder / name for name in ("tokenizer.json", *STATING_FILES))]
        digest = hashlib.sha256()
        for file in files if self.tokenizer_type == "HFTokenizer" else files[:3]:
            content = file.read_bytes() if file.is_file() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()
