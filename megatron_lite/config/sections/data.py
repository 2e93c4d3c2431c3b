"""`data`: corpora and tokenizer. Paths are relative to the file that holds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.fields import Flag, Section, Text, Whole
from megatron_lite.config.split import parse_split


def _blend(value: Any) -> Any:
    try:
        parse_blend(value)
    except ValueError as error:
        raise PydanticCustomError("blend", "{rule}", {"rule": str(error)}) from None
    return value


def _split(value: Any) -> Any:
    try:
        parse_split(value)
    except ValueError as error:
        raise PydanticCustomError("split", "{rule}", {"rule": str(error)}) from None
    return value


DataPath = Annotated[
    str | tuple[float | str, ...],
    BeforeValidator(_blend, json_schema_input_type=str | tuple[float | str, ...]),
]


def _sample_range(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] >= value[1]:
        rule = "must be [first, last] with first below last, which is not left out itself"
        raise PydanticCustomError("range", "{rule}", {"rule": rule})
    return value


SampleRange = Annotated[tuple[Whole, Whole], AfterValidator(_sample_range)]
Split = Annotated[str, BeforeValidator(_split, json_schema_input_type=str)]

TokenizerType = Literal[
    "SentencePieceTokenizer", "HFTokenizer", "GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"
]


class DataConfig(Section):
    """Corpora and tokenizer."""

    data_path: DataPath | None = None
    """Corpus that `split` cuts into training, validation and test: a prefix (its .bin and .idx lie
    side by side), or [weight, prefix, weight, prefix, ...] for a blend. null: the three paths below
    are used."""

    split: Split = "969,30,1"
    """Relative sizes of the training, validation and test parts of data_path, counted in
    documents."""

    train_data_path: DataPath | None = None
    """Training corpus or blend, instead of data_path and split."""

    valid_data_path: DataPath | None = None
    """Validation corpus or blend, beside train_data_path. null: none."""

    test_data_path: DataPath | None = None
    """Test corpus or blend, beside train_data_path. null: none."""

    skip_samples: tuple[SampleRange, ...] = ()
    """[[first, last], ...]: training samples first to last - 1, by their number in the run, are
    left out and the next ones read instead; ranges that the run has passed do nothing.
    `tools/inspect_data.py --which-documents` names the numbers of an iteration."""

    num_workers: Whole = 0
    """Processes a rank that read batches ahead, so that a step finds its own ready. What a step
    waits for data nevertheless is in metrics.jsonl. 0: the training process reads them itself."""

    tokenizer_type: TokenizerType = "NullTokenizer"
    """Kind of tokenizer. NullTokenizer: token ids only, no text; model.vocab_size gives their
    number."""

    tokenizer_model: Text | None = None
    """The .model file of SentencePieceTokenizer, or the folder of HFTokenizer (as saved by
    save_pretrained)."""

    vocab_file: Text | None = None
    """The vocab.json of GPT2BPETokenizer."""

    merge_file: Text | None = None
    """The merges.txt of GPT2BPETokenizer."""

    sft: Flag = False
    """Supervised fine-tuning on conversations: corpora are what tools/preprocess_chat.py wrote for
    model.seq_length, each with its loss mask beside it; only what the assistant says has a loss.
    Sizes of split are then in packs. With the two resets below conversations that share a sequence
    do not see each other. false: plain text."""

    eod_mask_loss: Flag = False
    """Leave the loss at end-of-document tokens out of the average. Needs, like the two fields
    below, a tokenizer that has such a token; with sft the loss mask says what counts."""

    reset_position_ids: Flag = False
    """Count positions from 0 after each end-of-document token, which is itself the last position
    of the document that it ends; with sft in each conversation. false: along the whole sequence."""

    reset_attention_mask: Flag = False
    """Let tokens attend only to their own document, with sft to their own conversation. false: to
    all of the sequence before them, whatever it holds."""
