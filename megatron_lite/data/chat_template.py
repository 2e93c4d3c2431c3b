"""A conversation → token ids, and which of them the assistant says: the model learns only those.

Two ways: a plain form for any tokenizer, and the chat template of a Hugging Face tokenizer. Called
by chat; reads no conversations from files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_lite.data.errors import DataError
from megatron_lite.data.jsonl import LineError
from megatron_lite.data.tokenizer_base import Tokenizer

ASSISTANT = "assistant"
PLAIN_ROLES = ("system", "user", ASSISTANT)


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Conversation(NamedTuple):
    """Token ids of a conversation, and for each whether it is to be learnt."""

    tokens: list[int]
    trained: list[bool]


class ChatTemplate(Protocol):
    """What turns the messages of one conversation into tokens; LineError where it can't."""

    def encode(self, messages: Sequence[Message]) -> Conversation: ...


class PlainTemplate:
    """Every message as `<|role|>`, a line feed, its content and the end-of-document token.

    The role's line is plain text, tokenized by itself. Learnt are the assistant's contents with the
    token that ends them. DataError where the tokenizer has no end-of-document token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.require(eod=True)
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message]) -> Conversation:
        """Return the tokens; LineError for a role other than system, user and assistant."""
        found = Conversation([], [])
        for role, content in messages:
            if role not in PLAIN_ROLES:
                raise LineError(f"role {role!r}; known are {', '.join(PLAIN_ROLES)}")
            said = self._tokenizer.encode(content, add_eod=True)
            head = self._tokenizer.tokenize(f"<|{role}|>\n")
            found.tokens.extend((*head, *said))
            found.trained.extend((*[False] * len(head), *[role == ASSISTANT] * len(said)))
        return found


class _Generation(Extension):
    """The tag {% generation %}, with which some templates mark what the assistant says.

    It is passed over: the same is found in any template by rendering its beginnings.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TokenizerTemplate:
    """The chat template of a Hugging Face tokenizer's folder, and its special tokens.

    Text and tokens are those of `apply_chat_template` in transformers, with one exception: a
    template that asks for today's date gets none, so that the result is the same tomorrow. What the
    assistant says is what the text of the messages up to its own has more than the text of those
    before it with the prompt for an answer, without white space at its end; a token counts if it
    begins there.
    """

    def __init__(self, model: str) -> None:
        folder = Path(model) if Path(model).is_dir() else Path(model).parent
        self._variables, source = _read_folder(folder)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except TemplateError as error:
            raise DataError(f"{folder}: chat template: {error}") from error
        except Exception as error:  # the package tokenizers raises plain Exception
            raise DataError(f"{folder / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]

    def encode(self, messages: Sequence[Message]) -> Conversation:
        """Return the tokens.

        LineError for a content that spells a special token, which the tokenizer would take for one,
        for messages that the template refuses, and where it changes earlier turns later on, so that
        nobody could tell what the assistant says.
        """
        for message in messages:
            for text in self._special:
                if text in message.content:
                    raise LineError(f"a content spells the special token {text!r}")
        text = self._render(messages)
        spans = [
            self._span(messages, number, text)
            for number, message in enumerate(messages)
            if message.role == ASSISTANT
        ]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        trained = [
            any(first <= start < last for first, last in spans) for start, _ in encoding.offsets
        ]
        return Conversation(encoding.ids, trained)

    def _span(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Where in the whole text the assistant speaks in message `number`."""
        before = self._render(messages[:number], add_generation_prompt=True)
        through = self._render(messages[: number + 1])
        if not through.startswith(before) or not text.startswith(through):
            raise LineError(
                f"the chat template writes earlier turns otherwise once message {number + 1} or a "
                f"later one is there, so what the assistant says can't be told"
            )
        return len(before), len(through.rstrip())

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=[message._asdict() for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except TemplateError as error:
            raise LineError(f"the chat template refuses it: {error}") from error
        except (TypeError, ValueError, LookupError) as error:
            raise LineError(f"the chat template fails on it: {error}") from error


def _read_folder(folder: Path) -> tuple[dict[str, str], str]:
    """Return the special tokens by name, such as eos_token, and the template of a folder."""
    stated: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
        if (folder / name).is_file():
            try:
                stated |= json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{folder / name}: not JSON: {error}") from error
    template = stated.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(template, str):
        raise DataError(
            f"{folder}: no chat template, neither chat_template.jinja nor in "
            f"tokenizer_config.json; put one there or use --chat-template plain"
        )
    variables = {}
    for name, value in stated.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    return variables, template


def _refuse(reason: str) -> None:
    """Templates call this to refuse a conversation."""
    raise TemplateError(reason)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as templates written for transformers expect it: no escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
