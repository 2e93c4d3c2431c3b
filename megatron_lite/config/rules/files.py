"""Corpora, tokenizer and checkpoints: which keys go together, and whether the files exist."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.draft import Absent
from megatron_lite.config.errors import NO_VALUE, Problem
from megatron_lite.config.rules.common import Rule, without_effect
from megatron_lite.config.schema import DataConfig, RunConfig
from megatron_lite.config.split import parse_split
from megatron_lite.config.tokenizer_files import FILE_KEYS, TOKENIZER_FILES

CORPORA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def corpus_is_given_once(cfg: RunConfig) -> Iterator[Problem]:
    """Either one corpus that is split, or one for each part."""
    data = cfg.data
    whole, train = data.data_path, data.train_data_path
    if whole is None and train is None:
        yield Problem("data.data_path", NO_VALUE, "is required, or data.train_data_path")
    if whole is not None:
        why = "beside data.data_path, which split cuts into parts"
        yield from without_effect(data, DataConfig, CORPORA[1:], "data", why)
    else:
        why = "without data.data_path"
        yield from without_effect(data, DataConfig, ("split",), "data", why)


def validation_exists(cfg: RunConfig) -> Iterator[Problem]:
    """An evaluation needs a part to evaluate on."""
    interval, lack = cfg.training.eval_interval, ""
    if cfg.data.train_data_path is not None and cfg.data.valid_data_path is None:
        lack = "data.valid_data_path, which is not given"
    elif cfg.data.data_path is not None and parse_split(cfg.data.split)[1] == 0:
        lack = f'a validation part, which data.split "{cfg.data.split}" leaves empty'
    if interval and lack:
        suggestion = "use 0 for no evaluation"
        yield Problem("training.eval_interval", interval, f"needs {lack}", suggestion)


def tokenizer_has_its_files(cfg: RunConfig) -> Iterator[Problem]:
    """Each kind of tokenizer reads its own files and no others."""
    data, kind = cfg.data, cfg.data.tokenizer_type
    needed = TOKENIZER_FILES[kind]
    for name in FILE_KEYS:
        if name not in needed:
            yield from without_effect(data, DataConfig, (name,), "data", f"with {kind}")
        elif getattr(data, name) is None:
            yield Problem(f"data.{name}", NO_VALUE, f"is required with {kind}")


def vocabulary_is_known(cfg: RunConfig) -> Iterator[Problem]:
    """Without a tokenizer nobody else knows the vocabulary's size."""
    if cfg.data.tokenizer_type == "NullTokenizer" and cfg.model.vocab_size is None:
        rule = "is required with data.tokenizer_type NullTokenizer, which has no vocabulary"
        yield Problem("model.vocab_size", NO_VALUE, rule, "give it, or name a tokenizer")


def loss_is_masked_once(cfg: RunConfig) -> Iterator[Problem]:
    """Packed conversations carry their own loss mask."""
    if cfg.data.sft:
        why = "with data.sft, whose loss mask says what counts"
        yield from without_effect(cfg.data, DataConfig, ("eod_mask_loss",), "data", why)


def missing_files(cfg: RunConfig) -> Iterator[Problem]:
    """Corpora and tokenizer files that this machine lacks; faulty fields are passed over."""
    for name in CORPORA:
        try:
            path = getattr(cfg.data, name)
        except Absent:
            continue
        for _, prefix in parse_blend(path) if path is not None else ():
            lacking = [
                f"{prefix}{end}" for end in (".bin", ".idx") if not os.path.isfile(prefix + end)
            ]
            if lacking:
                yield Problem(f"data.{name}", prefix, f"{' and '.join(lacking)} not found")
    for name in FILE_KEYS:
        try:
            path = getattr(cfg.data, name)
        except Absent:
            continue
        if path is not None and not os.path.exists(path):
            yield Problem(f"data.{name}", path, "not found")


RULES: tuple[Rule, ...] = (
    corpus_is_given_once,
    validation_exists,
    tokenizer_has_its_files,
    vocabulary_is_known,
    loss_is_masked_once,
)
