"""Supervised fine-tuning from chat JSON lines to the loss, on one process and on four."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.build import build_run_datasets
from megatron_lite.config.load import load_config
from megatron_lite.data.build import build_datasets
from megatron_lite.data.chat import ChatOptions, preprocess_chat
from megatron_lite.data.chat_template import Message, PlainTemplate
from megatron_lite.data.errors import DataError
from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.tokenizer import ByteTokenizer
from tests.distributed.plain import whole_model
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import train
from tests.distributed.small import layout, small_config
from tests.distributed.test_parity import assert_same_training

SEQ_LENGTH, STEPS, BATCH = 80, 12, 4
RESETS = ["data.reset_position_ids=true", "data.reset_attention_mask=true"]
Talk = tuple[Message, ...]


def write_talks(path: Path) -> list[Talk]:
    """Forty short conversations in which the assistant repeats what it hears."""
    rng = np.random.default_rng(5)
    talks: list[Talk] = []
    for _ in range(40):
        heard = "".join(rng.choice(list("abcd"), rng.integers(1, 12)))
        talks.append((Message("user", heard), Message("assistant", heard)))
    lines = [json.dumps({"messages": [m._asdict() for m in talk]}) for talk in talks]
    path.write_text("\n".join(lines))
    return talks


@pytest.fixture(scope="module")
def talks_and_config(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Talk], Path]:
    folder = tmp_path_factory.mktemp("sft")
    talks = write_talks(folder / "chat.jsonl")
    options = ChatOptions(
        [str(folder / "chat.jsonl")],
        str(folder / "chat"),
        "ByteTokenizer",
        SEQ_LENGTH,
        chat_template="plain",
    )
    preprocess_chat(options)
    config = small_config(
        folder / "run.json",
        Path(options.prefix),
        model={"seq_length": SEQ_LENGTH, "vocab_size": ByteTokenizer.vocab_size},
        training={"train_iters": STEPS, "global_batch_size": BATCH},
        data={"split": "100,0,0", "tokenizer_type": "ByteTokenizer", "sft": True},
    )
    return talks, config


def loss_of_each_alone(config_path: Path, talks: list[Talk]) -> float:
    """Mean loss of the assistant's tokens in the first batch, conversation by conversation."""
    config = load_config(config_path, [], 1).config
    vocab = ByteTokenizer.vocab_size
    stage = whole_model(config, vocab_size=vocab)
    samples = build_run_datasets(config, vocab_size=vocab).train
    template, spoken = PlainTemplate(ByteTokenizer()), {}
    for talk in talks:
        tokens, trained = template.encode(talk)
        spoken[tuple(tokens)] = trained
    total, count = 0.0, 0.0
    for sample in range(BATCH):
        tokens, _, ids = samples[sample]
        for number in range(int(ids[-1]) + 1):
            one = tokens[ids == number]
            if set(one.tolist()) == {ByteTokenizer.eod}:
                continue  # the padding
            row = torch.from_numpy(one)[None]
            mask = torch.tensor(spoken[tuple(one.tolist())])[None].float()
            with torch.no_grad():
                total += stage(MicroBatch(row[:, :-1], row[:, 1:], mask[:, 1:])).item()
            count += float(mask[:, 1:].sum())
    return total / count


def test_only_the_assistants_words_are_learnt(
    talks_and_config: tuple[list[Talk], Path], tmp_path: Path
) -> None:
    """The first loss is that of conversations run alone; then it falls, on any layout alike."""
    talks, config = talks_and_config
    (one,) = on_ranks(1, train, config, RESETS, tmp_path)
    assert one.losses[0] == pytest.approx(loss_of_each_alone(config, talks), rel=1e-5)
    assert one.losses[-1] < one.losses[0] - 0.3
    (tmp_path / "four").mkdir()
    overrides = [*layout(2, 2), *RESETS, "data.num_workers=1"]
    assert_same_training(on_ranks(4, train, config, overrides, tmp_path / "four"), one)


def test_a_loss_mask_is_not_overlooked(talks_and_config: tuple[list[Talk], Path]) -> None:
    _, path = talks_and_config
    data = load_config(path, ["data.sft=false"], 1).config.data
    prefix = str(data.data_path)
    blend = data.model_copy(update={"sft": True, "data_path": (0.5, prefix, 0.5, prefix)})
    assert build_datasets(blend, seq_length=SEQ_LENGTH, seed=1).train[7].shape == (3, 81)
    with pytest.raises(DataError, match=r"packed conversations .* but data.sft is false"):
        build_datasets(data, seq_length=SEQ_LENGTH, seed=1)
