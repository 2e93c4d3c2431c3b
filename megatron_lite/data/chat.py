"""Chat JSON lines → packs of whole conversations with a loss mask, for supervised fine-tuning.

Called by tools/preprocess_chat.py. Either both .bin/.idx pairs appear under their final names or
neither does; packed_dataset reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from megatron_lite.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Conversation,
    Message,
    PlainTemplate,
    TokenizerTemplate,
)
from megatron_lite.data.errors import DataError
from megatron_lite.data.first_fit import FirstFit
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder, token_dtype
from megatron_lite.data.jsonl import LineError, parse_record, read_chunks, replace_surrogates
from megatron_lite.data.packed_dataset import MASK_SUFFIX
from megatron_lite.data.tokenizer import named_tokenizer
from megatron_lite.data.tokenizer_base import Tokenizer

CHAT_TEMPLATES = ("tokenizer", "plain")
LONG_CONVERSATIONS = ("refuse", "cut", "drop")


@dataclass(frozen=True)
class ChatOptions:
    """The flags of tools/preprocess_chat.py."""

    input: Sequence[str]
    output_prefix: str
    tokenizer_type: str
    seq_length: int
    chat_template: Literal["tokenizer", "plain"] = "tokenizer"
    long_conversations: Literal["refuse", "cut", "drop"] = "refuse"
    json_key: str = "messages"
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    skip_bad_lines: bool = False

    @property
    def prefix(self) -> str:
        """The prefix that data.data_path names."""
        return f"{self.output_prefix}_{self.json_key}_document"

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; DataError where it has no end-of-document token, the padding."""
        tokenizer = named_tokenizer(self, vocab_size=self.vocab_size)
        tokenizer.require(eod=True)
        return tokenizer

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Build the template; DataError where the tokenizer should have one and hasn't."""
        if self.chat_template == "plain":
            return PlainTemplate(tokenizer)
        if self.tokenizer_type != "HFTokenizer" or self.tokenizer_model is None:
            raise DataError(
                f"{self.tokenizer_type} has no chat template of its own: use --chat-template plain"
            )
        return TokenizerTemplate(self.tokenizer_model)


@dataclass
class ChatReport:
    """What a run read and wrote; `lines()` is the text for a person."""

    conversations: int = 0
    packs: int = 0
    tokens: int = 0
    """Of conversations, without padding."""
    trained: int = 0
    """Of them those that have a loss."""
    cut: int = 0
    dropped: int = 0
    """Conversations that were too long."""
    bad_lines: int = 0
    surrogates: int = 0

    def lines(self, options: ChatOptions) -> Iterator[str]:
        """Yield the report, one fact group a line."""
        held = self.packs * (options.seq_length + 1)
        yield (
            f"{self.conversations} conversations, {self.tokens} tokens, {self.trained} of them "
            f"({self.trained / max(self.tokens, 1):.1%}) the assistant's"
        )
        yield (
            f"{self.packs} packs of {options.seq_length} + 1 tokens, padding "
            f"{1 - self.tokens / max(held, 1):.1%}, in {options.prefix}.bin and .idx, loss mask in "
            f"{options.prefix}{MASK_SUFFIX}.bin and .idx"
        )
        yield (
            f"too long: cut {self.cut}, dropped {self.dropped}; bad lines skipped: "
            f"{self.bad_lines}; lone surrogates replaced by U+FFFD: {self.surrogates}"
        )


def preprocess_chat(options: ChatOptions) -> ChatReport:
    """Run to the end and return the report.

    DataError for bad input (file, line, reason), for no conversations at all and for a tokenizer
    without what is needed. Conversations go whole, in their order, to the first pack with room.
    """
    if options.seq_length < 1:
        raise DataError(f"--seq-length {options.seq_length}: must be at least 1")
    return _Run(options).run()


class _Run:
    """One run of the tool."""

    def __init__(self, options: ChatOptions) -> None:
        self.options, self.report = options, ChatReport()
        self.tokenizer = options.tokenizer()
        assert self.tokenizer.eod is not None, "options.tokenizer() demands one"
        self.padding = self.tokenizer.eod
        self.template = options.template(self.tokenizer)
        self.packing: FirstFit[Conversation] = FirstFit(options.seq_length + 1)

    def run(self) -> ChatReport:
        options = self.options
        dtype = token_dtype(self.tokenizer.vocab_size)
        with (
            IndexedDatasetBuilder(options.prefix, dtype) as tokens,
            IndexedDatasetBuilder(f"{options.prefix}{MASK_SUFFIX}", np.uint8) as mask,
        ):
            for conversation in self._conversations():
                self.report.conversations += 1
                self.report.tokens += len(conversation.tokens)
                self.report.trained += sum(conversation.trained)
                if full := self.packing.add(conversation, len(conversation.tokens)):
                    self._write(full, tokens, mask)
            for rest in self.packing.rest():
                self._write(rest, tokens, mask)
            if not self.report.packs:
                raise DataError(
                    f"{' '.join(map(str, self.options.input))}: no conversations: bad lines "
                    f"skipped {self.report.bad_lines}, too long {self.report.dropped}"
                )
            mask.finalize()
            tokens.finalize()
        return self.report

    def _conversations(self) -> Iterator[Conversation]:
        """Yield the conversations of all files in their order."""
        total = sum(_size(path) for path in self.options.input)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
            before = 0
            for path in self.options.input:
                for chunk in read_chunks(path):
                    for number, line in enumerate(chunk.lines, start=chunk.first_line):
                        if line.strip():
                            yield from self._read(line, f"{path}: line {number}")
                    bar.update(before + chunk.position - bar.n)
                before += _size(path)

    def _read(self, line: bytes, place: str) -> Iterator[Conversation]:
        """Yield the conversation of a line, or nothing where it is left out and counted."""
        try:
            messages = self._messages(parse_record(line))
            conversation = self._fitted(self.template.encode(messages))
        except LineError as error:
            if not self.options.skip_bad_lines:
                raise DataError(
                    f"{place}: {error}; mend the line, or drop such lines with --skip-bad-lines"
                ) from error
            self.report.bad_lines += 1
        except DataError as error:  # a tokenizer that can't encode a text
            raise DataError(f"{place}: {error}") from error
        else:
            if conversation is not None:
                yield conversation

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        """Return the messages of a record; LineError where they are none to learn from."""
        key = self.options.json_key
        values = record.get(key)
        if not isinstance(values, list) or not values:
            raise LineError(f"field {key!r} is no list of messages")
        messages = []
        for number, value in enumerate(values, start=1):
            texts = []
            for name in Message._fields:
                text = value.get(name) if isinstance(value, dict) else None
                if not isinstance(text, str):
                    raise LineError(f"message {number} has no text as its {name}")
                clean, surrogates = replace_surrogates(text)
                self.report.surrogates += surrogates
                texts.append(clean)
            messages.append(Message(*texts))
        if not any(message.role == ASSISTANT for message in messages):
            raise LineError("no message of the assistant: nothing to learn")
        return messages

    def _fitted(self, conversation: Conversation) -> Conversation | None:
        """Return what goes into a pack, None where it is left out for its length."""
        room = self.options.seq_length + 1
        tokens, trained = conversation
        choice = self.options.long_conversations
        if len(tokens) > room and choice == "refuse":
            raise LineError(
                f"a conversation of {len(tokens)} tokens, but a pack holds {room}: take a larger "
                f"--seq-length, or --long-conversations cut or drop"
            )
        if len(tokens) > room and choice == "drop":
            self.report.dropped += 1
            return None
        self.report.cut += len(tokens) > room
        # The first token is nobody's label: nothing stands before it.
        trained = [False, *trained[1:room]]
        if not any(trained):
            raise LineError(f"nothing of the assistant's within the first {room} tokens")
        return Conversation(tokens[:room], trained)

    def _write(
        self,
        conversations: list[Conversation],
        tokens: IndexedDatasetBuilder,
        mask: IndexedDatasetBuilder,
    ) -> None:
        """Append one pack, filled up with the end-of-document token."""
        lengths = [len(conversation.tokens) for conversation in conversations]
        padding = self.options.seq_length + 1 - sum(lengths)
        if padding:
            filling = Conversation([self.padding] * padding, [False] * padding)
            conversations = [*conversations, filling]
            lengths.append(padding)
        tokens.add_document([t for c in conversations for t in c.tokens], lengths)
        mask.add_document([int(t) for c in conversations for t in c.trained], lengths)
        self.report.packs += 1


def _size(path: str) -> int:
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    return Path(path).stat().st_size
