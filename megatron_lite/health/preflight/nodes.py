"""The nodes of a job: code, config, versions, devices, files, folders, clocks. No process group."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.schema import RunConfig
from megatron_lite.health.preflight import folders
from megatron_lite.health.preflight.clocks import clock_skews
from megatron_lite.health.preflight.comparison import Findings, astray, by_text, compare, places
from megatron_lite.health.preflight.facts import Facts, collect
from megatron_lite.health.preflight.verdict import GRACE, Judge
from megatron_lite.rendezvous import node_name

FACTS_LIMIT = 20.0
"""Seconds in which a rank must have looked at itself, its files and folders."""


def check_nodes(
    judge: Judge,
    config: RunConfig,
    run_dir: Path,
    *,
    local_rank: int,
    device: torch.device,
    env: Mapping[str, str],
) -> None:
    """Compare the ranks; PreflightFailed, on all of them, where one is not fit. Collective."""
    exchange, shared = judge.exchange, folders.shared_folders(config, run_dir)
    exchange.tell("node", node_name(env))
    facts = collect(config, run_dir=run_dir, local_rank=local_rank, device=device, env=env)
    exchange.tell("facts", asdict(facts))
    if judge.presides:
        exchange.answer("plan", _compare(judge, shared))
    plan = judge.answered("plan", FACTS_LIMIT + GRACE)
    paths = {folder.name: folder.path for folder in shared}
    trials = [folders.Trial(**values) for values in plan["trials"]]
    said = [folders.take_part(trial, paths[trial.folder], exchange.rank) for trial in trials]
    exchange.tell("folders", said)
    witnesses = plan["witnesses"]
    if judge.presides:
        # First of all: who hangs in a folder does not come to compare clocks.
        there = _look_for_files(judge, trials, paths)
        witnesses = [rank for rank in witnesses if rank in there]
    # Rank 0 may wait for files twice, for those that write them and for the file system to show.
    looks = 2 * len(trials) * folders.SETTLE + GRACE
    skews = clock_skews(exchange, witnesses, limit=GRACE, patience=looks + GRACE)
    if judge.presides:
        judge.record.skews = skews
        judge.record.add(Findings(warnings=astray(skews, judge.record.nodes)))
    judge.settle("nodes", looks + 2 * GRACE)


def _compare(judge: Judge, shared: Sequence[folders.Folder]) -> dict[str, Any]:
    """Rank 0: judge the facts; returns what all ranks are to do next."""
    record = judge.record
    told = judge.exchange.told("facts", limit=FACTS_LIMIT)
    record.facts = {rank: Facts(**values) for rank, values in told.items()}
    if missing := judge.silent(told):
        nodes = judge.exchange.told("node", limit=0.0)
        record.findings.faults.append(
            f"{places(missing, nodes)}: not heard of within {FACTS_LIMIT:g} s; perhaps a file "
            "system does not answer there"
        )
        return {"trials": [], "witnesses": []}
    record.add(compare(record.facts))
    first: dict[str, int] = {}
    for rank, node in sorted(record.nodes.items()):
        first.setdefault(node, rank)
    return {
        "trials": [asdict(trial) for trial in _trials(judge, shared)],
        "witnesses": [rank for rank in first.values() if rank != 0],
    }


def _trials(judge: Judge, shared: Sequence[folders.Folder]) -> list[folders.Trial]:
    trials, token = [], secrets.token_hex(8)
    for folder in shared:
        try:
            trials.append(folders.begin(folder, token))
        except FileExistsError:
            continue  # it is the same as one before, or will be made in it
        except OSError as error:
            why = f"{folder.name} {folder.path}: can't be written ({error.strerror})"
            judge.record.findings.faults.append(f"{places([0], judge.record.nodes)}: {why}")
    return trials


def _look_for_files(
    judge: Judge, trials: Sequence[folders.Trial], paths: Mapping[str, Path]
) -> set[int]:
    """Rank 0: judge what the ranks could write, and whether it is seen here; returns those that do
    not hang."""
    told = judge.exchange.told("folders", limit=folders.SETTLE * len(trials) + GRACE)
    texts = {rank: [text for text in said if text] for rank, said in told.items()}
    for rank in judge.silent(told):
        texts[rank] = [f"hangs when it writes in {' or '.join(map(str, paths.values()))}"]
    for number, trial in enumerate(trials):
        path = paths[trial.folder]
        wrote = [rank for rank, said in told.items() if not said[number]]
        for rank in folders.unseen(trial, path, wrote):
            texts[rank].append(f"{trial.folder} {path}: rank 0 does not see what it wrote there")
        folders.end(trial, path)
    judge.record.findings.faults += by_text(texts, judge.record.nodes)
    return set(told)
