"""B56: no field of the configuration is without effect, and none is missing in fields.py."""

from __future__ import annotations

import ast
import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite import build
from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.fields import Section
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import RunConfig
from megatron_lite.data import tokenizer
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.trainer import Trainer
from tests.distributed.fields import FIELDS, Probe
from tests.distributed.models import write_corpus
from tests.distributed.processes import ROOT
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import logical_state, make_trainer
from tests.distributed.small import rows, small_config

PROBES = {path: probe for path, probe in FIELDS.items() if isinstance(probe, Probe)}


def leaves(section: type[Section], path: str = "") -> Iterator[str]:
    """JSON paths of all fields that are not sections themselves."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, Section)]
        if inner:
            yield from leaves(inner[0], f"{path}{name}.")
        else:
            yield f"{path}{name}"


def observe(config: Path, overrides: list[str], run_dir: Path) -> dict[str, Any]:
    """Train three steps and write down everything that a field might change."""
    trainer = make_trainer(config, overrides, run_dir)
    seen: dict[str, Any] = {"tables": [], "norms": [], "rates": [], "scales": [], "forwards": 0}
    _listen(trainer, seen)
    stages = trainer.engine.modules().values()
    local = [tuple(parameter.shape) for stage in stages for parameter in stage.parameters()]
    first = logical_state(trainer.engine, "fp32")
    seen["shapes"] = (local, {name: values.shape for name, values in first.items()})
    layers = [layer for stage in stages for layer in stage.layers]
    seen["compiled"] = [layer._compiled_call_impl is not None for layer in layers]
    # Compiling takes seconds; that it was asked for is enough to see here.
    if not any(seen["compiled"]):
        trainer.fit()
    trainer.report.close()
    trained = logical_state(trainer.engine, "fp32")
    seen["weights"] = hashlib.sha256(b"".join(v.tobytes() for v in trained.values())).hexdigest()
    trainer.engine.close()
    logged = rows(run_dir)
    seen["rows"] = [row["iteration"] for row in logged]
    seen["losses"] = [row["lm_loss"] for row in logged]
    seen["valid"] = [row["lm_loss"] for row in rows(run_dir, "valid")]
    seen["test"] = [row["lm_loss"] for row in rows(run_dir, "test")]
    seen["iterations"] = trainer.progress.iteration
    seen["files"] = sorted(path.name for path in run_dir.iterdir())
    seen["log level"] = logging.getLogger("DeepSpeed").level
    return seen


def _listen(trainer: Trainer, seen: dict[str, Any]) -> None:
    run, step = trainer.executor.run, trainer.engine.step

    def listening_run(program: Any, *args: Any, **kwargs: Any) -> Any:
        seen["tables"].append(program.schedule.actions)
        return run(program, *args, **kwargs)

    def listening_step(lr: float) -> Any:
        outcome = step(lr)
        seen["rates"].append(lr)
        seen["norms"].append(outcome.grad_norm)
        seen["scales"].append(outcome.loss_scale)
        return outcome

    def count(*_: Any) -> None:
        seen["forwards"] += 1

    trainer.executor.run = listening_run  # type: ignore[method-assign]
    trainer.engine.step = listening_step  # type: ignore[method-assign]
    for stage in trainer.engine.modules().values():
        for layer in stage.layers:
            layer.mlp.register_forward_pre_hook(count)


def observe_all(config: Path, probes: dict[str, Probe], folder: Path) -> dict[str, Any]:
    """For each probe what it shows without and with the change."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}
    found = {}
    for path, probe in probes.items():
        pair = []
        for overrides in (probe.base, (*probe.base, probe.change)):
            if overrides not in known:
                run_dir = folder / str(len(known))
                run_dir.mkdir()
                named = [
                    re.sub("CORPUS|OTHER|ENDS", lambda m: str(folder / m[0].lower()), text)
                    for text in overrides
                ]
                try:
                    known[overrides] = observe(config, named, run_dir)
                except Exception as error:
                    raise AssertionError(f"{path}, with {named}: {error}") from error
            pair.append(known[overrides][probe.shows])
        found[path] = pair
    return found


def write_ends(prefix: Path) -> None:
    """A corpus in which the end-of-document tokens of two tokenizers, 256 and 257, are frequent."""
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    builder.add_document(np.random.default_rng(9).integers(250, 258, 2000))
    builder.finalize()


def test_b56_the_table_has_every_field_and_no_other() -> None:
    assert sorted(FIELDS) == sorted(leaves(RunConfig))


def test_b56_every_field_changes_what_it_should(corpus: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    write_corpus(tmp_path / "other", seed=8)
    write_ends(tmp_path / "ends")
    config = small_config(tmp_path / "run.json", tmp_path / "corpus", training={"train_iters": 3})
    (found,) = on_ranks(1, observe_all, config, PROBES, tmp_path, watchdog=180)
    assert found.keys() == PROBES.keys()
    assert [path for path, (without, with_) in found.items() if without == with_] == []
    assert [path for path, (_, with_) in found.items() if not with_] == [], "nothing was seen"


def test_b56_the_named_tests_exist_and_set_their_fields() -> None:
    for path, named in FIELDS.items():
        if isinstance(named, Probe):
            continue
        file, function = named.split("::")
        text = (ROOT / file).read_text()
        defined = {node.name for node in ast.walk(ast.parse(text)) if hasattr(node, "name")}
        assert function in defined, f"{path}: {named} is not there"
        assert path.rpartition(".")[2] in text, f"{path}: {file} never names it"


def test_machines_give_the_number_of_ranks(corpus: Path, tmp_path: Path) -> None:
    """launch.nodes and launch.gpus_per_node, where no launcher tells."""
    config = small_config(tmp_path / "run.json", corpus, training={"global_batch_size": 24})
    for overrides, ranks in (
        ([], 1),
        (["launch.nodes=2"], 2),
        (["launch.nodes=2", "launch.gpus_per_node=3"], 6),
    ):
        assert load_config(config, overrides).world_size == ranks


def test_debug_reaches_the_comms_logger(corpus: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run.json", corpus)
    overrides = ["deepspeed.comms_logger.enabled=true", "deepspeed.comms_logger.debug=true"]
    assert deepspeed_config(load_config(config, overrides).config, 1)["comms_logger"]["debug"]


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("SentencePieceTokenizer", {"tokenizer_model": "a.model"}),
        ("HFTokenizer", {"tokenizer_model": "folder"}),
        ("GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
    ],
)
def test_tokenizer_files_are_read(
    kind: str,
    files: dict[str, str],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tokenizer_model, vocab_file and merge_file arrive where tokenizers are made."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        tokenizer, "build_tokenizer", lambda kind, **given: asked.update(given, kind=kind)
    )
    config = small_config(tmp_path / "run.json", corpus)
    overrides = [f"data.tokenizer_type={kind}"]
    overrides += [f"data.{name}={tmp_path / file}" for name, file in files.items()]
    build.build_run_tokenizer(load_config(config, overrides).config)
    expected = {"tokenizer_model": "model"}
    for name, file in files.items():
        assert asked[expected.get(name, name)] == str(tmp_path / file)
    assert asked["kind"] == kind
