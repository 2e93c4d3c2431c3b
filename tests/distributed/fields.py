"""For every field of the configuration: what changes with it, or the test that shows what it does.

A `Probe` is run by test_fields.py. A text names a test; the fields that DeepSpeed alone reads are
handed to it as they are, and what they do there is DeepSpeed's affair.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """Setting `change` on top of `base` must change what test_fields calls `shows`."""

    change: str
    shows: str
    base: tuple[str, ...] = ()


def model(change: str, shows: str, *base: str) -> Probe:
    return Probe(f"model.{change}", shows, tuple(f"model.{b}" for b in base))


def training(change: str, shows: str, *base: str) -> Probe:
    return Probe(f"training.{change}", shows, tuple(f"training.{b}" for b in base))


def rates(change: str, *base: str) -> Probe:
    return Probe(f"optimizer.{change}", "rates", tuple(f"optimizer.{b}" for b in base))


def fp16(change: str, shows: str, *base: str) -> Probe:
    return Probe(
        f"precision.{change}", shows, ("precision.dtype=fp16", *(f"precision.{b}" for b in base))
    )


VIRTUAL = "parallel.virtual_pipeline_model_parallel_size"
ROPE = "position_embedding_type=rope"
COSINE, WSD = "lr_decay_style=cosine", "lr_decay_style=WSD"
EVALUATE = "eval_interval=1"
OWN_PATHS = ("data.data_path=null", "data.split=969,30,1", "data.train_data_path=CORPUS")
PARITY = "tests/distributed/test_parity.py::test_layout_parity"
DEEPSPEED = "tests/unit/config/test_deepspeed.py"
ARRIVES = f"{DEEPSPEED}::test_b58_every_value_arrives_under_deepspeeds_own_key"
READ = f"{DEEPSPEED}::test_deepspeed_reads_every_key"
FP16 = "tests/distributed/test_fp16.py"
RELOAD = "tests/distributed/test_reload.py"
STARTS = "tests/distributed/test_starts.py"
RESUME = "tests/distributed/test_resume.py"
REWINDING = "tests/distributed/test_rewinding.py"

MODEL = {
    "num_layers": model("num_layers=3", "shapes"),
    "hidden_size": model("hidden_size=64", "shapes"),
    "num_attention_heads": model("num_attention_heads=8", "losses"),
    "seq_length": model("seq_length=8", "losses", "max_position_embeddings=16"),
    "ffn_hidden_size": model("ffn_hidden_size=128", "shapes"),
    "kv_channels": model("kv_channels=16", "shapes"),
    "num_query_groups": model("num_query_groups=2", "shapes"),
    "vocab_size": model("vocab_size=96", "shapes"),
    "max_position_embeddings": model("max_position_embeddings=32", "shapes"),
    "position_embedding_type": model(ROPE, "shapes"),
    "rotary_base": model("rotary_base=100", "losses", ROPE),
    "rotary_percent": model("rotary_percent=0.5", "losses", ROPE),
    "normalization": model("normalization=RMSNorm", "shapes"),
    "norm_epsilon": model("norm_epsilon=0.1", "losses"),
    "swiglu": model("swiglu=true", "shapes"),
    "add_bias_linear": model("add_bias_linear=false", "shapes"),
    "add_qkv_bias": model("add_qkv_bias=false", "shapes"),
    "qk_layernorm": model("qk_layernorm=true", "shapes"),
    "untie_embeddings_and_output_weights": model(
        "untie_embeddings_and_output_weights=true", "shapes"
    ),
    "make_vocab_size_divisible_by": model("make_vocab_size_divisible_by=64", "shapes"),
    "init_method_std": model("init_method_std=0.05", "losses"),
    "attention_dropout": model("attention_dropout=0.5", "losses"),
    "hidden_dropout": model("hidden_dropout=0.5", "losses"),
}
PARALLEL = {
    "tensor_model_parallel_size": "tests/distributed/test_parity.py::layout",
    "pipeline_model_parallel_size": "tests/distributed/test_parity.py::layout",
    "pipeline_schedule": Probe("parallel.pipeline_schedule=gpipe", "tables"),
    "virtual_pipeline_model_parallel_size": Probe(
        f"{VIRTUAL}=4",
        "tables",
        (f"{VIRTUAL}=2", "parallel.pipeline_schedule=interleaved", "model.num_layers=4"),
    ),
    "pipeline_model_parallel_layout": (
        "tests/distributed/test_cases_pipeline.py::test_uneven_stages"
    ),
    "sequence_parallel": (
        "tests/distributed/test_evaluation.py"
        "::test_b27_impossible_shapes_are_refused_before_anything_is_sent"
    ),
    "distributed_timeout_minutes": (
        "tests/distributed/test_command.py::test_b51_a_rank_that_hangs_fails_the_run_in_time"
    ),
}
TRAINING = {
    "micro_batch_size": training("micro_batch_size=2", "tables"),
    "global_batch_size": training("global_batch_size=8", "tables"),
    "rampup_batch_size": training("rampup_batch_size=[2, 2, 4]", "tables"),
    "train_iters": training("train_iters=2", "iterations"),
    "train_samples": training(
        "train_samples=8", "iterations", "train_iters=null", "train_samples=12"
    ),
    "seed": training("seed=4", "losses"),
    "clip_grad": training("clip_grad=0.01", "weights"),
    "eval_interval": training(EVALUATE, "valid"),
    "eval_iters": training("eval_iters=1", "valid", EVALUATE),
    "eval_micro_batch_size": training("eval_micro_batch_size=4", "tables", EVALUATE),
    "recompute_granularity": training("recompute_granularity=full", "forwards"),
    "recompute_method": training(
        "recompute_method=block", "forwards", "recompute_granularity=full"
    ),
    "recompute_num_layers": training(
        "recompute_num_layers=2",
        "forwards",
        "recompute_granularity=full",
        "recompute_method=block",
    ),
    "exit_duration_in_mins": training("exit_duration_in_mins=1e-9", "iterations"),
    "on_nan": "tests/distributed/test_nonfinite.py::test_the_first_bad_value_is_named",
    "rewind_batches": f"{REWINDING}::test_a_spike_and_the_batch_alone",
    "max_rewinds": f"{REWINDING}::test_what_else_may_be_done_about_a_spike",
    "loss_spike.action": f"{REWINDING}::test_what_else_may_be_done_about_a_spike",
    "loss_spike.window": f"{REWINDING}::test_what_else_may_be_done_about_a_spike",
    "loss_spike.threshold": f"{REWINDING}::test_what_else_may_be_done_about_a_spike",
    "check_replicas_interval": "tests/distributed/test_replicas.py::test_a_drifted_copy_is_named",
    "compile": training("compile=true", "compiled"),
}
OPTIMIZER = {
    "lr": rates("lr=0.01"),
    "min_lr": rates("min_lr=0.0001", COSINE),
    "lr_decay_style": rates("lr_decay_style=linear"),
    "lr_decay_iters": rates("lr_decay_iters=30", COSINE),
    "lr_warmup_iters": rates("lr_warmup_iters=2"),
    "lr_warmup_fraction": rates("lr_warmup_fraction=0.5"),
    "lr_wsd_decay_iters": rates("lr_wsd_decay_iters=2", WSD, "lr_wsd_decay_iters=3"),
    "weight_decay": Probe("optimizer.weight_decay=0.5", "weights"),
    "adam_beta1": Probe("optimizer.adam_beta1=0.5", "weights"),
    "adam_beta2": Probe("optimizer.adam_beta2=0.5", "weights"),
    "adam_eps": Probe("optimizer.adam_eps=0.1", "weights"),
    "lr_batch_scaling.rule": rates(
        'lr_batch_scaling={"rule": "linear", "base_global_batch_size": 2}',
        'lr_batch_scaling={"rule": "sqrt", "base_global_batch_size": 2}',
    ),
    "lr_batch_scaling.base_global_batch_size": rates(
        'lr_batch_scaling={"rule": "sqrt", "base_global_batch_size": 8}',
        'lr_batch_scaling={"rule": "sqrt", "base_global_batch_size": 2}',
    ),
}
PRECISION = {
    "dtype": Probe("precision.dtype=bf16", "losses"),
    "loss_scale": fp16("loss_scale=128", "scales"),
    "initial_loss_scale": fp16("initial_loss_scale=1024", "scales"),
    "min_loss_scale": f"{FP16}::test_b29_a_floor_above_one_and_the_last_step_tells",
    "loss_scale_window": fp16("loss_scale_window=1", "scales", "initial_loss_scale=64"),
    "hysteresis": f"{FP16}::test_b29_hysteresis_and_regrowth",
    "accumulate_grads_in_fp32": Probe(
        "precision.accumulate_grads_in_fp32=false", "norms", ("precision.dtype=bf16",)
    ),
    "tf32": "tests/gpu/test_training.py::test_tf32_is_switched_by_the_config",
    "max_consecutive_nonfinite_steps": (
        f"{FP16}::test_b29_scale_falls_to_its_floor_and_the_run_stops"
    ),
}
ZERO = {
    "stage": PARITY.replace("test_layout_parity", "layout"),
    "offload_optimizer.device": PARITY.replace("test_layout_parity", "layout"),
    **dict.fromkeys(
        (
            "offload_optimizer.nvme_path",
            "offload_optimizer.pin_memory",
            "offload_optimizer.ratio",
            "offload_optimizer.buffer_count",
            "offload_optimizer.pipeline_read",
            "offload_optimizer.pipeline_write",
            "offload_optimizer.fast_init",
            "offload_param.device",
            "offload_param.nvme_path",
            "offload_param.pin_memory",
            "offload_param.buffer_count",
            "offload_param.buffer_size",
            "offload_param.max_in_cpu",
            "reduce_bucket_size",
            "contiguous_gradients",
            "reduce_scatter",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        ),
        ARRIVES,
    ),
    "overlap_comm": READ,
    "allgather_bucket_size": READ,
    "round_robin_gradients": READ,
}
DEEPSPEED_SECTION = {
    **{f"zero_optimization.{name}": shown for name, shown in ZERO.items()},
    **dict.fromkeys(
        (
            "aio.block_size",
            "aio.queue_depth",
            "aio.intra_op_parallelism",
            "aio.single_submit",
            "aio.overlap_events",
            "aio.use_gds",
            "wall_clock_breakdown",
            "comms_logger.enabled",
            "comms_logger.prof_all",
            "comms_logger.prof_ops",
            "comms_logger.verbose",
        ),
        ARRIVES,
    ),
    "comms_logger.debug": "tests/distributed/test_fields.py::test_debug_reaches_the_comms_logger",
}
DATA = {
    "data_path": Probe("data.data_path=OTHER", "losses"),
    "split": Probe("data.split=50,50,0", "losses"),
    "train_data_path": Probe("data.train_data_path=OTHER", "losses", OWN_PATHS),
    "valid_data_path": Probe(
        "data.valid_data_path=OTHER",
        "valid",
        (*OWN_PATHS, "data.valid_data_path=CORPUS", f"training.{EVALUATE}"),
    ),
    "test_data_path": Probe(
        "data.test_data_path=OTHER",
        "test",
        (*OWN_PATHS, "data.valid_data_path=CORPUS", f"training.{EVALUATE}"),
    ),
    "skip_samples": Probe("data.skip_samples=[[2, 5]]", "losses"),
    "num_workers": "tests/distributed/test_prefetch.py::test_workers_take_the_waiting_away",
    "tokenizer_type": Probe(
        "data.tokenizer_type=ByteTokenizer",  # whose end of document is another id
        "losses",
        (
            "data.data_path=ENDS",
            "data.split=100,0,0",
            "model.vocab_size=258",
            "data.eod_mask_loss=true",
        ),
    ),
    "tokenizer_model": "tests/distributed/test_fields.py::test_tokenizer_files_are_read",
    "vocab_file": "tests/distributed/test_fields.py::test_tokenizer_files_are_read",
    "merge_file": "tests/distributed/test_fields.py::test_tokenizer_files_are_read",
    "sft": "tests/distributed/test_sft.py::test_only_the_assistants_words_are_learnt",
    "eod_mask_loss": Probe("data.eod_mask_loss=true", "losses"),
    "reset_position_ids": Probe("data.reset_position_ids=true", "losses"),
    "reset_attention_mask": Probe("data.reset_attention_mask=true", "losses"),
}
CHECKPOINT = {
    "save": f"{RESUME}::test_what_a_checkpoint_says_of_itself",
    "load": f"{RELOAD}::test_b40_steps_that_exist_and_steps_that_do_not",
    "save_interval": f"{RESUME}::test_only_the_newest_are_kept",
    "keep_last": f"{RESUME}::test_only_the_newest_are_kept",
    "ckpt_step": f"{RELOAD}::test_b40_steps_that_exist_and_steps_that_do_not",
    "exit_on_missing_checkpoint": f"{RELOAD}::test_b40_steps_that_exist_and_steps_that_do_not",
    "async_save": f"{STARTS}::test_an_asynchronous_save_holds_the_step_it_began_at",
    "verify_on_load": f"{STARTS}::test_checksums_are_compared_unless_that_is_switched_off",
    "fall_back_to_older": f"{STARTS}::test_damage_is_named_and_older_ones_need_leave",
    "finetune": f"{STARTS}::test_b38_masters_follow_loaded_weights",
    "no_load_optim": f"{STARTS}::test_going_on_without_the_optimizer",
    "no_load_rng": f"{STARTS}::test_random_streams_are_left_where_that_is_asked_for",
    "strict": f"{STARTS}::test_b40_lenient_lists_what_is_missing",
    "changed_data": f"{STARTS}::test_b60_other_data_from_their_beginning",
}
MEASURES = "tests/distributed/test_measures.py::test_every_layout_measures_what_one_process_does"
WANDB = "tests/unit/monitoring/test_wandb_run.py"
PROFILER = "tests/unit/monitoring/test_profiler.py"

LOGGING = {
    "log_interval": Probe("logging.log_interval=2", "rows"),
    "tensorboard_dir": Probe("logging.tensorboard_dir=board", "files"),
    "csv_dir": Probe("logging.csv_dir=csv", "files"),
    "wandb_project": f"{WANDB}::test_a_run_has_its_project_name_config_and_curves",
    "wandb_exp_name": f"{WANDB}::test_a_run_has_its_project_name_config_and_curves",
    "log_params_norm": MEASURES,
    "log_num_zeros_in_grad": MEASURES,
    "log_histograms_interval": MEASURES,
    **dict.fromkeys(
        ("profile", "profile_step_start", "profile_step_end", "profile_ranks"),
        f"{PROFILER}::test_the_window_and_the_chosen_ranks_alone",
    ),
    "deepspeed_log_level": Probe("logging.deepspeed_log_level=error", "log level"),
}
LAUNCH_SECTION = dict.fromkeys(
    ("nodes", "gpus_per_node"),
    "tests/distributed/test_fields.py::test_machines_give_the_number_of_ranks",
) | {
    "environment": "tests/unit/test_train.py::test_variables_of_the_config_are_set",
    "requeue": "tests/slurm/test_life.py::test_asked_to_leave_it_is_queued_again_and_goes_on",
    "preflight": "tests/distributed/test_preflight.py::test_it_can_be_left_out",
    **dict.fromkeys(
        ("cpus_per_task", "time", "partition", "account", "job_name"),
        "tests/unit/launch/test_submit.py::test_b50_a_job_gets_everything",
    ),
}
FIELDS: dict[str, Probe | str] = {
    f"{section}.{name}": shown
    for section, fields in {
        "model": MODEL,
        "parallel": PARALLEL,
        "training": TRAINING,
        "optimizer": OPTIMIZER,
        "precision": PRECISION,
        "deepspeed": DEEPSPEED_SECTION,
        "data": DATA,
        "checkpoint": CHECKPOINT,
        "logging": LOGGING,
        "launch": LAUNCH_SECTION,
    }.items()
    for name, shown in fields.items()
}
