"""Rules that join fields, and the warnings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TP = "parallel.tensor_model_parallel_size"
ZERO = "deepspeed.zero_optimization"


def parallel(tp: int = 1, pp: int = 1, **more: object) -> dict[str, object]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


def zero(**keys: object) -> dict[str, object]:
    return {"zero_optimization": keys}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        # case B59: divisibility
        (
            {"model": {"hidden_size": 65}},
            "model.hidden_size",
            r"= 65: .*num_attention_heads 8.*use 64 or 72",
        ),
        (
            {"model": {"num_attention_heads": 6, "hidden_size": 72}, "parallel": parallel(4)},
            TP,
            r"= 4: must divide model.num_attention_heads 6; use 1, 2, 3 or 6",
        ),
        (
            {"model": {"num_query_groups": 2}, "parallel": parallel(4)},
            TP,
            r"= 4: must divide model.num_query_groups 2; use 1 or 2",
        ),
        (
            {"model": {"num_query_groups": 3}},
            "model.num_query_groups",
            r"= 3: must divide model.num_attention_heads 8; use 1, 2, 4 or 8",
        ),
        (
            {"model": {"ffn_hidden_size": 130}, "parallel": parallel(4)},
            TP,
            r"must divide model.ffn_hidden_size 130",
        ),
        (
            {"model": {"make_vocab_size_divisible_by": 2}, "parallel": parallel(4)},
            TP,
            r"must divide model.make_vocab_size_divisible_by 2; use 1 or 2",
        ),
        (
            {"model": {"seq_length": 30}, "parallel": parallel(4, sequence_parallel=True)},
            TP,
            r"must divide model.seq_length .* 30",
        ),
        (
            {"parallel": parallel(1, sequence_parallel=True)},
            "parallel.sequence_parallel",
            r"needs .* above 1.*use false",
        ),
        (
            {"model": {"seq_length": 64, "max_position_embeddings": 32}},
            "model.seq_length",
            r"at most model.max_position_embeddings 32",
        ),
        (
            {"model": {"position_embedding_type": "rope", "kv_channels": 7}},
            "model.rotary_percent",
            r"turns 7; use 0.857143",
        ),
        (
            {"model": {"position_embedding_type": "rope", "rotary_percent": 0}},
            "model.rotary_percent",
            r"at least 2; it turns 0; use 0.25",
        ),
        # pipeline
        (
            {"parallel": parallel(1, 5)},
            "parallel.pipeline_model_parallel_size",
            r"at most model.num_layers 4",
        ),
        (
            {"parallel": parallel(1, 2, pipeline_model_parallel_layout=[1, 2])},
            "parallel.pipeline_model_parallel_layout",
            r"must sum to model.num_layers 4; it sums to 3",
        ),
        (
            {"parallel": parallel(1, 2, pipeline_model_parallel_layout=[1, 2, 1])},
            "parallel.pipeline_model_parallel_layout",
            r"for each stage .*2.*it has 3",
        ),
        # length and batches
        ({"training": {"train_iters": ...}}, "training.train_iters", r"required, or .*samples"),
        (
            {"training": {"train_samples": 100}},
            "training.train_iters",
            r"cannot stand beside training.train_samples 100",
        ),
        (
            {"training": {"train_iters": ..., "train_samples": 3}},
            "training.train_samples",
            r"at least one batch of 16",
        ),
        (
            {"training": {"rampup_batch_size": [4, 5, 100]}},
            "training.rampup_batch_size",
            r"increment 5 must divide 16 - 4 = 12",
        ),
        (
            {"training": {"rampup_batch_size": [16, 4, 100]}},
            "training.rampup_batch_size",
            r"start 16 must be below training.global_batch_size 16",
        ),
        (
            {"training": {"rampup_batch_size": [1, 3, 100]}},
            "training.rampup_batch_size",
            r"multiple of .* 2 x 1 = 2; 1 is not",
        ),
        # recomputation and learning rate
        (
            {"training": {"recompute_num_layers": 2}},
            "training.recompute_num_layers",
            r"no effect without .*full",
        ),
        (
            {"training": {"recompute_granularity": "selective", "recompute_method": "block"}},
            "training.recompute_method",
            r"no effect without .*full",
        ),
        (
            {"training": {"recompute_granularity": "full", "recompute_num_layers": 5}},
            "training.recompute_num_layers",
            r"layers of a stage, 4; use 4",
        ),
        ({"optimizer": {"min_lr": 1}}, "optimizer.min_lr", r"at most optimizer.lr 0.001"),
        (
            {"optimizer": {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}},
            "optimizer.lr_warmup_iters",
            r"cannot stand beside",
        ),
        (
            {"optimizer": {"lr_decay_style": "WSD"}},
            "optimizer.lr_wsd_decay_iters",
            r"is required with .*WSD",
        ),
        (
            {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}},
            "optimizer.lr_wsd_decay_iters",
            r"at most optimizer.lr_decay_iters 10",
        ),
        (
            {"optimizer": {"lr_wsd_decay_iters": 3}},
            "optimizer.lr_wsd_decay_iters",
            r"no effect without .*WSD",
        ),
        # precision
        ({"precision": {"loss_scale": 8}}, "precision.loss_scale", r'no effect with .*"bf16"'),
        (
            {"precision": {"dtype": "fp32", "hysteresis": 1}},
            "precision.hysteresis",
            r'no effect with .*"fp32"',
        ),
        (
            {"precision": {"dtype": "fp16", "loss_scale": 8, "loss_scale_window": 9}},
            "precision.loss_scale_window",
            r"beside the fixed loss_scale 8",
        ),
        (
            {"precision": {"dtype": "fp16", "initial_loss_scale": 1000}},
            "precision.initial_loss_scale",
            r"power of two; use 512 or 1024",
        ),
        (
            {"precision": {"dtype": "fp16", "initial_loss_scale": 2, "min_loss_scale": 5}},
            "precision.initial_loss_scale",
            r"at least precision.min_loss_scale 5; use 8",
        ),
        # ZeRO
        (
            {"deepspeed": zero(stage=0)},
            f"{ZERO}.stage",
            r"stage 1 is the same update with less memory; use 1",
        ),
        ({"deepspeed": zero(stage=4)}, f"{ZERO}.stage", r"at most 3"),
        (
            {"deepspeed": zero(stage=3), "parallel": parallel(1, 2)},
            f"{ZERO}.stage",
            r"pipeline_model_parallel_size 2.*use stage 1 or 2, or pipeline_model_parallel_size 1",
        ),
        (
            {"deepspeed": zero(offload_param={"device": "cpu"})},
            f"{ZERO}.offload_param.device",
            r"needs stage 3.*stage is 1",
        ),
        (
            {"deepspeed": zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/d"})},
            f"{ZERO}.offload_optimizer.device",
            r"nvme needs stage 3",
        ),
        (
            {"deepspeed": zero(stage=3, offload_optimizer={"device": "nvme"})},
            f"{ZERO}.offload_optimizer.nvme_path",
            r"is required with .*nvme",
        ),
        (
            {"deepspeed": zero(stage=3, offload_param={"device": "nvme", "nvme_path": "d"})},
            f"{ZERO}.offload_param.nvme_path",
            r"absolute",
        ),
        (
            {"deepspeed": zero(offload_optimizer={"device": "cpu", "ratio": 0.5})},
            f"{ZERO}.offload_optimizer.ratio",
            r"no effect with stage 1",
        ),
        (
            {"deepspeed": zero(offload_optimizer={"pin_memory": False})},
            f"{ZERO}.offload_optimizer.pin_memory",
            r"no effect with .*none",
        ),
        ({"deepspeed": zero(overlap_comm=True)}, f"{ZERO}.overlap_comm", r"stage 2 only"),
        ({"deepspeed": zero(sub_group_size=9)}, f"{ZERO}.sub_group_size", r"with stage 1"),
        (
            {"deepspeed": zero(stage=3, allgather_bucket_size=8)},
            f"{ZERO}.allgather_bucket_size",
            r"no effect with stage 3",
        ),
        (
            {"deepspeed": zero(allgather_bucket_size=9)},
            f"{ZERO}.allgather_bucket_size",
            r"must be even; use 8 or 10",
        ),
        (
            {"deepspeed": {"aio": {"queue_depth": 4}}},
            "deepspeed.aio.queue_depth",
            r"no effect without nvme",
        ),
        # data, tokenizer, evaluation, checkpoints
        ({"data": {"data_path": ...}}, "data.data_path", r"required, or data.train_data_path"),
        (
            {"data": {"valid_data_path": "v"}},
            "data.valid_data_path",
            r"no effect beside data.data_path",
        ),
        (
            {"data": {"data_path": ..., "train_data_path": "t", "split": "1,1,1"}},
            "data.split",
            r"no effect without data.data_path",
        ),
        (
            {"data": {"data_path": ..., "train_data_path": "t"}, "training": {"eval_interval": 5}},
            "training.eval_interval",
            r"needs data.valid_data_path.*use 0",
        ),
        (
            {"data": {"split": "1,0,1"}, "training": {"eval_interval": 5}},
            "training.eval_interval",
            r'"1,0,1" leaves empty',
        ),
        ({"model": {"vocab_size": None}}, "model.vocab_size", r"required with .*NullTokenizer"),
        (
            {"data": {"tokenizer_type": "SentencePieceTokenizer"}},
            "data.tokenizer_model",
            r"required with SentencePieceTokenizer",
        ),
        (
            {"data": {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}},
            "data.merge_file",
            r"required with GPT2BPETokenizer",
        ),
        (
            {"data": {"tokenizer_type": "ByteTokenizer", "tokenizer_model": "m"}},
            "data.tokenizer_model",
            r"no effect with ByteTokenizer",
        ),
        (
            {"data": {"sft": True, "eod_mask_loss": True}},
            "data.eod_mask_loss",
            r"no effect with data.sft, whose loss mask",
        ),
        ({"checkpoint": {"save_interval": 5}}, "checkpoint.save_interval", r"without .*save"),
        ({"checkpoint": {"keep_last": 5}}, "checkpoint.keep_last", r"without checkpoint.save"),
        ({"checkpoint": {"ckpt_step": 5}}, "checkpoint.ckpt_step", r"without checkpoint.load"),
        (
            {"checkpoint": {"exit_on_missing_checkpoint": True}},
            "checkpoint.exit_on_missing_checkpoint",
            r"without checkpoint.load",
        ),
    ],
)
def test_refused_combinations(problems, changes, path: str, words: str) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert re.search(words, str(found[path]))


def test_world_size_must_hold_whole_models(problems) -> None:
    found = problems({"parallel": parallel(2, 2)}, world_size=6)
    assert "2 x 2 = 4; use 4 or 8 ranks" in str(found["world size"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"hidden_size": 65, "kv_channels": 8}},
        {
            "model": {
                "seq_length": 64,
                "max_position_embeddings": 32,
                "position_embedding_type": "rope",
            }
        },
        {"model": {"position_embedding_type": "rope", "rotary_percent": 0.25}},
        {"parallel": parallel(1, 2, pipeline_model_parallel_layout=[1, 3])},
        {"deepspeed": zero(stage=2, overlap_comm=True)},
        {"training": {"recompute_granularity": "full", "recompute_method": "block"}},
        {"data": {"split": "1,0,1"}, "training": {"eval_interval": 0}},
        {"checkpoint": {"load": "a", "ckpt_step": 0, "exit_on_missing_checkpoint": False}},
        {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}},
    ],
)
def test_accepted_combinations(load, changes) -> None:
    load(changes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_b24_fewer_micro_batches_than_stages(load, count: int) -> None:
    changes = {"parallel": parallel(1, 4), "training": {"global_batch_size": 2 * count}}
    warnings = load(changes).warnings
    assert len(warnings) == 1 and "\n" not in warnings[0]
    assert f"{count} micro-batches for 4 pipeline stages" in warnings[0]
    assert ("fewer than the stages" in warnings[0]) == (count < 4)
    assert "global_batch_size 32 would give" in warnings[0]


def test_enough_micro_batches_need_no_warning(load) -> None:
    changes = {"parallel": parallel(1, 4), "training": {"global_batch_size": 32}}
    assert load(changes).warnings == []


@pytest.mark.parametrize(
    ("changes", "world_size", "words"),
    [
        ({"parallel": parallel(8), "launch": {"gpus_per_node": 4, "nodes": 2}}, 8, "network"),
        ({"model": {"num_attention_heads": 16}, "parallel": parallel(16)}, 16, "8 GPUs"),
        (
            {
                "model": {"hidden_size": 8192, "num_attention_heads": 64},
                "parallel": parallel(16),
            },
            16,
            "leaves 512 of 8192 hidden columns",
        ),
        ({"optimizer": {"lr_warmup_iters": 10}}, 1, "is not below lr_decay_iters 10"),
    ],
)
def test_costly_choices_are_only_warned_of(load, changes, world_size: int, words: str) -> None:
    assert any(words in line for line in load(changes, world_size=world_size).warnings)


def test_no_warning_of_thin_shards_below_8192_columns(load) -> None:
    changes = {"model": {"hidden_size": 4096, "num_attention_heads": 64}, "parallel": parallel(8)}
    assert load(changes).warnings == []


def readme_table() -> list[list[str]]:
    text = (Path(__file__).parents[3] / "configs/README.md").read_text(encoding="utf-8")
    table = text.split("| `stage` |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_b35_documented_zero_stages_are_those_the_check_accepts(load, problems) -> None:
    rows = readme_table()
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for stage, without, with_pipeline, optimizer, parameters in rows:
        for pp, word in ((1, without), (2, with_pipeline)):
            for offload, devices in (
                ("offload_optimizer", optimizer),
                ("offload_param", parameters),
            ):
                for device in ("none", "cpu", "nvme"):
                    folder = {"nvme_path": "/disk"} if device == "nvme" else {}
                    settings = zero(stage=int(stage), **{offload: {"device": device, **folder}})
                    changes = {"parallel": parallel(1, pp), "deepspeed": settings}
                    if word == "yes" and device in devices.split(", "):
                        load(changes)
                    else:
                        found = problems(changes)
                        assert all(path.startswith(ZERO) for path in found)
