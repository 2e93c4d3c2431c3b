"""Conversations → tokens, loss mask and packs, against examples made by hand and transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from megatron_lite.data.boundaries import Boundaries
from megatron_lite.data.chat import ChatOptions, preprocess_chat
from megatron_lite.data.chat_template import Message, PlainTemplate, TokenizerTemplate
from megatron_lite.data.errors import DataError, TooSmallError
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.jsonl import LineError
from megatron_lite.data.loader import micro_batches
from megatron_lite.data.packed_dataset import MASK_SUFFIX, PackedDataset
from megatron_lite.data.tokenizer import ByteTokenizer

WriteJsonl = Callable[..., str]
EOD = ByteTokenizer.eod
CHATML = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (  # the turns of Llama 2 and Mistral: no prompt for an answer, an end that is a token
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
FORGETFUL = (  # drops what the assistant thought once the talk goes on
    "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content[:1] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def talk(*contents: str) -> dict[str, Any]:
    """A record in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    }


def messages(*contents: str) -> list[Message]:
    return [Message(**message) for message in talk(*contents)["messages"]]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a Hugging Face tokenizer of byte-level BPE with a chat template."""

    def write(template: str) -> Path:
        path = tmp_path / "tokenizer"
        path.mkdir()
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        inner.train_from_iterator(["user assistant hello there the the"] * 9, trainer)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        fast.save_pretrained(str(path))
        return path

    return write


def test_the_plain_form() -> None:
    template = PlainTemplate(ByteTokenizer())
    found = template.encode([Message("system", "be"), *messages("hi", "yo")])
    parts = [
        (b"<|system|>\n", False),
        (b"be", False),
        (None, False),
        (b"<|user|>\n", False),
        (b"hi", False),
        (None, False),
        (b"<|assistant|>\n", False),
        (b"yo", True),
        (None, True),
    ]
    expected = [(t, learnt) for text, learnt in parts for t in ([EOD] if text is None else text)]
    assert list(zip(*found, strict=True)) == expected
    with pytest.raises(LineError, match="role 'tool'"):
        template.encode([Message("tool", "x")])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["there <b>\u00e9\u4e2d</b><|im_end|>", "the end<|im_end|>"]),
        (INST, [" there <b>\u00e9\u4e2d</b></s>", " the end </s>"]),
    ],
)
def test_a_tokenizers_own_template(
    template: str, said: list[str], folder: Callable[[str], Path]
) -> None:
    """Tokens are those of transformers; learnt is what the assistant says and what ends it."""
    path = folder(template)
    turns = messages("hello", "there <b>\u00e9\u4e2d</b>", "the user", "the end ")
    found = TokenizerTemplate(str(path)).encode(turns)
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    as_dicts = [turn._asdict() for turn in turns]
    assert found.tokens == theirs.apply_chat_template(as_dicts, return_dict=False)
    learnt, runs = "", []
    for token, counts in zip(found.tokens, found.trained, strict=True):
        if counts:
            learnt += theirs.convert_ids_to_tokens(token) + "\0"
        elif learnt:
            runs.append(learnt)
            learnt = ""
    runs += [learnt] if learnt else []
    assert [theirs.convert_tokens_to_string(run.split("\0")[:-1]) for run in runs] == said


def test_what_a_template_can_not_do(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = folder(CHATML)
    template = TokenizerTemplate(str(path))
    with pytest.raises(LineError, match=r"spells the special token '<\|im_end\|>'"):
        template.encode(messages("see <|im_end|>", "yes"))
    with pytest.raises(LineError, match="refuses it: unknown role tool"):
        template.encode([Message("tool", "x"), *messages("a", "b")])
    (path / "chat_template.jinja").write_text(FORGETFUL)
    forgetful = TokenizerTemplate(str(path))
    assert sum(forgetful.encode(messages("a", "bcd")).trained) > 0
    with pytest.raises(LineError, match="writes earlier turns otherwise once message 2"):
        forgetful.encode(messages("a", "bcd", "e", "f"))
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(DataError, match="chat template: "):
        TokenizerTemplate(str(path))
    (path / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"no chat template.*--chat-template plain"):
        TokenizerTemplate(str(path))


def options(tmp_path: Path, *inputs: str, **changes: Any) -> ChatOptions:
    given = {"tokenizer_type": "ByteTokenizer", "chat_template": "plain", "seq_length": 63}
    return ChatOptions(inputs, str(tmp_path / "out"), **(given | changes))


def test_packs_hold_each_conversation_once(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    records = [
        talk(*("".join(rng.choice(list("abc"), rng.integers(0, 12))) for _ in range(2 * n)))
        for n in rng.integers(1, 2, 300)
    ]
    chosen = options(tmp_path, write_jsonl(records[:200]), write_jsonl(records[200:], name="b"))
    report = preprocess_chat(chosen)
    tokens, mask = (IndexedDataset(chosen.prefix + end) for end in ("", MASK_SUFFIX))
    found, template = Counter[tuple[int, ...]](), PlainTemplate(ByteTokenizer())
    for pack in range(tokens.num_documents):
        first, last = tokens.document_indices[pack : pack + 2]
        assert tokens.sequence_lengths[first:last].sum() == 64
        for number in range(first, last):
            if mask[number].any():
                found[tuple(zip(tokens[number].tolist(), mask[number].tolist(), strict=True))] += 1
            else:
                assert number == last - 1 and (tokens[number] == EOD).all(), "the padding"
    expected = Counter(
        tuple(zip(*template.encode(messages(*(m["content"] for m in r["messages"]))), strict=True))
        for r in records
    )
    assert found == expected
    assert report.conversations == 300 and report.packs == tokens.num_documents
    assert report.trained == sum(mask[i].sum() for i in range(len(mask)))
    assert len(list(report.lines(chosen))) == 3


def test_long_conversations(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    path = write_jsonl([talk("a", "b"), talk("a", 60 * "b"), talk(60 * "a", "b")])
    with pytest.raises(DataError, match=r"line 2: a conversation of 86 tokens.*holds 64"):
        preprocess_chat(options(tmp_path, path))
    assert list(tmp_path.glob("out*")) == []
    dropped = preprocess_chat(options(tmp_path, path, long_conversations="drop"))
    assert (dropped.conversations, dropped.dropped) == (1, 2)
    with pytest.raises(DataError, match="line 3: nothing of the assistant's within the first 64"):
        preprocess_chat(options(tmp_path, path, long_conversations="cut"))
    chosen = options(tmp_path, path, long_conversations="cut", skip_bad_lines=True)
    cut = preprocess_chat(chosen)
    assert (cut.conversations, cut.cut, cut.bad_lines) == (2, 2, 1)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "field 'messages' is no list of messages"),
        ({"messages": []}, "field 'messages' is no list of messages"),
        ({"messages": ["hello"]}, "message 1 has no text as its role"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has no text as its content"),
        (talk("only the user"), "no message of the assistant"),
        (b"{", "not a whole JSON object"),
    ],
)
def test_lines_that_are_no_conversation(
    record: Any, reason: str, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([talk("a", "b"), record])
    with pytest.raises(DataError, match=rf"in.jsonl: line 2: {reason}.*--skip-bad-lines"):
        preprocess_chat(options(tmp_path, path))
    report = preprocess_chat(options(tmp_path, path, skip_bad_lines=True))
    assert (report.conversations, report.bad_lines) == (1, 1)


def test_what_a_run_needs(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    path = write_jsonl([talk("a", "b")])
    with pytest.raises(DataError, match=r"ByteTokenizer has no chat template.*plain"):
        preprocess_chat(options(tmp_path, path, chat_template="tokenizer"))
    with pytest.raises(DataError, match="no such file"):
        preprocess_chat(options(tmp_path, "missing.jsonl"))
    with pytest.raises(DataError, match="none: no conversations"):
        preprocess_chat(options(tmp_path, write_jsonl([], name="none")))


def test_micro_batches_of_packs(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    """Loss where the label is the assistant's; conversations and padding know their bounds."""
    chosen = options(tmp_path, write_jsonl([talk("a", "bc"), talk("d", "e")]), seq_length=69)
    preprocess_chat(chosen)
    dataset = PackedDataset(IndexedDataset(chosen.prefix), seq_length=69, seed=1)
    resets = Boundaries(packed=True, reset_position_ids=True, reset_attention_mask=True)
    batch = next(micro_batches(dataset, [[0, -1]], boundaries=resets))
    assert batch.position_ids is not None and batch.document_ids is not None
    head = len(b"<|user|>\na\0<|assistant|>\n")
    assert head == 25
    weights = batch.loss_mask[0]
    assert weights.nonzero().flatten().tolist() == [24, 25, 26, 52, 53]
    assert batch.labels[0][[24, 25, 26, 52, 53]].tolist() == [*b"bc", EOD, *b"e", EOD]
    assert batch.document_ids[0].tolist() == [0] * 28 + [1] * 27 + [2] * 14
    assert batch.position_ids[0].tolist() == [*range(28), *range(27), *range(14)]
    assert float(batch.loss_mask[1].sum()) == 0


def test_an_epoch_shows_every_pack_once(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    chosen = options(tmp_path, write_jsonl([talk(str(n), 20 * "x") for n in range(20)]))
    preprocess_chat(chosen)
    indexed = IndexedDataset(chosen.prefix)
    orders = {}
    for seed in (1, 2):
        dataset = PackedDataset(indexed, seq_length=63, seed=seed, document_range=(3, 17))
        orders[seed] = [dataset.pack(sample) for sample in range(28)]
        assert sorted(orders[seed][:14]) == sorted(orders[seed][14:]) == list(range(3, 17))
        assert orders[seed][:14] != orders[seed][14:]
    assert orders[1] != orders[2]
    assert dataset.pieces(5) == [(dataset.pack(5), 0, 64)]
    with pytest.raises(DataError, match=r"packed for sequences of 63.*seq-length 32"):
        PackedDataset(indexed, seq_length=32, seed=1)
    with pytest.raises(DataError, match=r"token id 256.*has 256 ids"):
        PackedDataset(indexed, seq_length=63, seed=1, vocab_size=256)[0]
    with pytest.raises(TooSmallError, match="no pack"):
        PackedDataset(indexed, seq_length=63, seed=1, document_range=(4, 4))
    Path(f"{chosen.prefix}{MASK_SUFFIX}.idx").unlink()
    with pytest.raises(DataError, match=r"data.sft.*preprocess_chat"):
        PackedDataset(indexed, seq_length=63, seed=1)


def test_the_template_is_read_from_either_file(folder: Callable[[str], Path]) -> None:
    path = folder(CHATML)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    for stated in (
        CHATML,
        [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}],
    ):
        text = json.dumps(config | {"chat_template": stated})
        (path / "tokenizer_config.json").write_text(text)
        assert sum(TokenizerTemplate(str(path)).encode(messages("a", "b")).trained) == 2
