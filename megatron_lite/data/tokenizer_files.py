"""The tokenizers that are read from files: SentencePiece, Hugging Face `tokenizers`, GPT-2 BPE.

Templates, truncation and padding stored in such a file are switched off: preprocessing alone says
which special tokens a document gets. Built by tokenizer.build_tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from megatron_lite.data.errors import DataError
from megatron_lite.data.tokenizer_base import STATING_FILES, TokenBatch, Tokenizer

# Names looked for, in this order, where no file beside tokenizer.json states the special tokens.
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>")
_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOD>")
_USUAL_PAD = ("<pad>", "<|pad|>", "[PAD]")
_BLANK_MARK = "\u2581"


def _existing(kind: str, path: str) -> Path:
    if not Path(path).is_file():
        raise DataError(f"{kind}: {path}: no such file")
    return Path(path)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file; an id of -1 in it means that the token doesn't exist.

    SentencePiece writes a blank as U+2581, so that character itself would come back as a blank. It
    is spelt in bytes instead, unless the model lacks byte pieces or puts a blank before each text.
    """

    def __init__(self, model: str) -> None:
        path = _existing("SentencePieceTokenizer", model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: not a SentencePiece model") from error
        self.vocab_size = self._processor.vocab_size()
        self.bos = self._known(self._processor.bos_id())
        self.eod = self._known(self._processor.eos_id())
        self.pad = self._known(self._processor.pad_id())
        pieces = self._processor
        marks = [pieces.piece_to_id(f"<0x{byte:02X}>") for byte in _BLANK_MARK.encode()]
        prefixed = pieces.encode("a", out_type=str)[0].startswith(_BLANK_MARK)
        exact = not prefixed and pieces.unk_id() not in marks
        self._mark_bytes: list[int] = marks if exact else []

    @staticmethod
    def _known(token: int) -> int | None:
        return token if token >= 0 else None

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the text alone."""
        if self._mark_bytes and _BLANK_MARK in text:
            first, *others = (self._encode(part) for part in text.split(_BLANK_MARK))
            return first + [token for other in others for token in (*self._mark_bytes, *other)]
        return self._encode(text)

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of all texts, straight into arrays."""
        marked = [self._mark_bytes and _BLANK_MARK in text for text in texts]
        if any(marked):
            return super().tokenize_batch(texts)
        parts = self._processor.encode(
            list(texts), add_bos=False, add_eos=False, num_threads=1, return_type="numpy"
        )
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return TokenBatch(np.concatenate(parts) if parts else np.empty(0, np.int32), lengths)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._processor.encode(text, add_bos=False, add_eos=False)
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text; begin, end and pad leave no trace."""
        text: str = self._processor.decode([int(token) for token in tokens])
        return text


class _RustTokenizer(Tokenizer):
    """What the two kinds on top of the `tokenizers` package share."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a special token spelt in the text is plain text
        self._inner = inner
        self._ids: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise DataError(f"{type(self).__name__}: the vocabulary is empty")
        self.vocab_size = max(self._ids.values()) + 1

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the text alone."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of all texts; the package spreads them over its threads."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return TokenBatch.from_lists([encoding.ids for encoding in encodings])

    def byte_level_bpe(self) -> str | None:
        """Return this tokenizer without the tokens that plain text never gives.

        Special tokens are left out, so that a reader of the file that matches them in a text, as
        most do, finds none; post-processors too, which only add special tokens.
        """
        description = json.loads(self._inner.to_str())
        model, decoder = description["model"], description["decoder"] or {}
        if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
            return None
        if "ByteLevel" not in json.dumps(decoder):
            return None
        description["added_tokens"] = [
            token for token in description["added_tokens"] if not token["special"]
        ]
        description["post_processor"] = None
        return json.dumps(description, ensure_ascii=False)

    def special_texts(self) -> list[str]:
        """Return the added tokens as they are spelt."""
        return [token.content for token in self._inner.get_added_tokens_decoder().values()]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text; special tokens show as they are spelt."""
        return self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)


class HFTokenizer(_RustTokenizer):
    """A tokenizer.json, or the folder that holds one, as saved by save_pretrained.

    Begin, end and pad are those of tokenizer_config.json or special_tokens_map.json in the same
    folder; where neither file exists, special tokens with the usual names (<s>, </s>,
    <|endoftext|>, …) are taken.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        path = _existing("HFTokenizer", str(path / "tokenizer.json" if path.is_dir() else path))
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{path}: not a tokenizer.json: {error}") from error
        super().__init__(inner)
        stated = self._stated(path.parent)
        if stated is None:
            special = {
                token.content: number
                for number, token in inner.get_added_tokens_decoder().items()
                if token.special
            }
            self.bos, self.eod, self.pad = (
                next((special[name] for name in names if name in special), None)
                for names in (_USUAL_BOS, _USUAL_EOS, _USUAL_PAD)
            )
        else:
            self.bos, self.eod, self.pad = (
                self._id_of(path, key, stated.get(key))
                for key in ("bos_token", "eos_token", "pad_token")
            )

    @staticmethod
    def _stated(folder: Path) -> dict[str, Any] | None:
        """Return the special tokens that files beside tokenizer.json state, None without files."""
        found: dict[str, Any] | None = None
        for name in STATING_FILES:
            if (folder / name).is_file():
                try:
                    content = json.loads((folder / name).read_text(encoding="utf-8"))
                except ValueError as error:
                    raise DataError(f"{folder / name}: not JSON: {error}") from error
                found = (found or {}) | content
        return found

    def _id_of(self, path: Path, key: str, stated: Any) -> int | None:
        text = stated.get("content") if isinstance(stated, dict) else stated
        if text is None:
            return None
        if text not in self._ids:
            raise DataError(f"{path}: lacks the {key} {text!r} that the files beside it state")
        return self._ids[text]


class GPT2BPETokenizer(_RustTokenizer):
    """GPT-2's byte-level BPE from vocab.json and merges.txt; <|endoftext|> begins and ends."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        files = [str(_existing("GPT2BPETokenizer", path)) for path in (vocab_file, merge_file)]
        try:
            bpe = tokenizers.models.BPE.from_file(*files)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{' and '.join(files)}: not a BPE vocabulary: {error}") from error
        inner = tokenizers.Tokenizer(bpe)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        super().__init__(inner)
        self.bos = self.eod = self._ids.get("<|endoftext|>")
