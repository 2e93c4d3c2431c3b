"""What a single field accepts (case B59)."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("changes", "read", "value"),
    [
        ({"training": {"train_iters": 10.0}}, lambda c: c.training.train_iters, 10),
        (
            {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 5e8}}},
            lambda c: c.deepspeed.zero_optimization.reduce_bucket_size,
            500_000_000,
        ),
        ({"optimizer": {"lr": 1}}, lambda c: c.optimizer.lr, 1.0),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2.0}}},
            lambda c: c.deepspeed.zero_optimization.stage,
            2,
        ),
        (
            {"precision": {"dtype": "fp16", "loss_scale": 128}},
            lambda c: c.precision.loss_scale,
            128.0,
        ),
        ({"training": {"clip_grad": 0}}, lambda c: c.training.clip_grad, 0.0),
    ],
)
def test_b59_numbers_in_any_spelling(load, changes, read, value) -> None:
    got = read(load(changes).config)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("optimizer", "lr", "1e-4", "must be a number, not text; write 1e-4 without quotes"),
        ("optimizer", "lr", float("nan"), "must be a finite number"),
        ("optimizer", "lr", float("inf"), "must be a finite number"),
        ("optimizer", "lr", 10**400, "must be a finite number"),
        ("optimizer", "lr", [1e-4], "must be a number, not a list"),
        ("optimizer", "lr", None, "must be a number, not null"),
        ("optimizer", "lr", True, "must be a number, not true or false"),
        ("optimizer", "lr", -1, "must be at least 0"),
        ("optimizer", "adam_beta1", 1.0, "must be below 1"),
        ("training", "train_iters", 10.5, "must be a whole number; use 10 or 11"),
        ("training", "train_iters", "10", "must be a whole number, not text; write 10 without"),
        ("training", "train_iters", float("inf"), "must be a whole number"),
        ("training", "micro_batch_size", 0, "must be above 0; use 1 or more"),
        ("training", "micro_batch_size", {"a": 1}, "must be a whole number, not an object"),
        ("training", "seed", None, "leave the key out for its default, 1234"),
        ("training", "compile", "false", "must be true or false, not text; write false without"),
        ("training", "compile", "True", "write true without quotes"),
        ("training", "compile", 1, "must be true or false, not a number"),
        ("training", "rampup_batch_size", [1, 2], "wrong number of entries"),
        ("training", "rampup_batch_size", "1,2,3", "must be a list, not text"),
        ("model", "swiglu", None, "must be true or false, not null"),
        ("model", "hidden_dropout", 1.5, "must be at most 1"),
        ("model", "normalization", "rmsnorm", 'did you mean "RMSNorm"?'),
        ("precision", "dtype", ["fp16", "bf16"], "must be one of fp32, fp16, bf16"),
        ("precision", "loss_scale", 0, 'must be "dynamic" or a number above 0'),
        ("precision", "loss_scale", "128", 'must be "dynamic" or a number above 0'),
        ("checkpoint", "save", "", "must not be empty"),
        ("checkpoint", "save", 3, "must be text, not a number"),
        ("parallel", "pipeline_schedule", "1F1B", 'did you mean "1f1b"?'),
    ],
)
def test_b59_refused_values(problems, section: str, key: str, value, words: str) -> None:
    assert words in str(problems({section: {key: value}})[f"{section}.{key}"])


def test_b59_faulty_entry_of_a_list_is_pointed_at(problems) -> None:
    found = problems({"training": {"rampup_batch_size": [4, 0.5, 100]}})
    assert "must be a whole number" in found["training.rampup_batch_size[1]"].rule


@pytest.mark.parametrize(
    ("ranges", "rule"),
    [
        ([[0, 1], [3, 3]], "must be [first, last] with first below last"),
        ([[0, 1], [3]], "has the wrong number of entries"),
        ([[0, 1], 3], "must be a list, not a number"),
        ([[0, 1], [2, "3"]], "must be a whole number, not text"),
    ],
)
def test_faulty_ranges_of_samples_are_pointed_at(problems, ranges, rule) -> None:
    assert rule in problems({"data": {"skip_samples": ranges}})["data.skip_samples[1]"].rule


def test_b59_fp16_and_bf16_at_once(problems) -> None:
    found = problems({"precision": {"fp16": True, "bf16": True}})
    assert {"precision.fp16", "precision.bf16"} <= set(found)


@pytest.mark.parametrize("value", [[], 3, "x", None])
def test_section_must_be_an_object(problems, value) -> None:
    assert "must be an object" in problems({"parallel": value})["parallel"].rule


def test_sections_are_immutable(load) -> None:
    cfg = load().config
    with pytest.raises(Exception, match="frozen"):
        cfg.model.num_layers = 3
