"""The way in: config file and overrides to a checked `RunConfig`, or an error with every fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_lite.config.batch import data_parallel_size
from megatron_lite.config.compose import Tree, compose
from megatron_lite.config.derive import derive
from megatron_lite.config.draft import draft_section
from megatron_lite.config.errors import ConfigError, Problem
from megatron_lite.config.json_text import join
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.validate import advise, check, default_world_size, missing_files

__all__ = ["ConfigError", "LoadedConfig", "Problem", "load_config", "resolved_dict"]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and what is known about it."""

    config: RunConfig
    world_size: int
    """Ranks it was checked for."""
    origins: dict[str, str] = field(default_factory=dict)
    """JSON path of each value to `file:line`, `--set`, `default` or `derived`."""
    warnings: list[str] = field(default_factory=list)
    """Legal but costly choices, one line each."""
    notes: list[str] = field(default_factory=list)
    """How it differs from the config of the checkpoint that it goes on from, one line each."""

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model on these ranks."""
        return data_parallel_size(self.world_size, self.config.parallel)


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    world_size: int | None = None,
    *,
    check_files: bool = False,
    beneath: Tree | None = None,
) -> LoadedConfig:
    """Read, compose, resolve and check a configuration.

    Args:
        overrides: `section.key=JSON`, later ones win; a word that is not JSON is text.
        world_size: ranks of the run; None: launch.nodes x launch.gpus_per_node.
        check_files: also demand that corpora and tokenizer files exist on this machine.
        beneath: values that hold where neither file nor overrides say anything; it is changed.

    Raises:
        ConfigError: with all problems at once.
    """
    tree = beneath or Tree()
    tree.merge(compose(path, overrides))
    problems = list(tree.problems)
    draft = draft_section(RunConfig, tree.values, "", problems.append)
    derived = derive(draft, problems.append)
    if world_size is None:
        world_size = default_world_size(draft)
    problems += check(draft, world_size)
    if check_files:
        problems += missing_files(draft)
    if problems or world_size is None:
        raise ConfigError([replace(p, origin=p.origin or tree.origin(p.path)) for p in problems])
    config = RunConfig.model_validate(draft.as_dict())
    origins = {p: tree.origins.get(p, "default") for p, _ in leaves(resolved_dict(config))}
    origins |= dict.fromkeys(derived, "derived")
    return LoadedConfig(config, world_size, origins, advise(config, world_size))


def resolved_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; as a config file of its own it gives the same run."""
    return config.model_dump(mode="json")


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """JSON path and value of everything that is no object."""
    for key, value in values.items():
        place = join(path, key)
        if isinstance(value, Mapping):
            yield from leaves(value, place)
        else:
            yield place, value
