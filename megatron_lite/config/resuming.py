"""A run that goes on from a checkpoint: which of the saved settings hold, and which may differ.

The order is: what the user writes, then the checkpoint, then defaults. Nothing is changed silently:
every difference is listed once, and what would make it another model is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lite.config.compose import Tree
from megatron_lite.config.errors import ConfigError, Problem, show
from megatron_lite.config.load import LoadedConfig, leaves, load_config, resolved_dict

_INHERITED = ("model", "training", "optimizer", "precision", "data")
"""Sections that a resumed run takes from the checkpoint where its own config is silent."""
COMPARED = (*_INHERITED, "parallel", "deepspeed")
"""Sections that are compared with those of the checkpoint."""
_ANY_MODEL = ("model.make_vocab_size_divisible_by", "model.init_method_std")
"""Of the model, what may differ: it changes neither the logical tensors nor what they compute."""
_ORDER = ("training.seed", "model.seq_length")
"""What decides, beside the data section, which sample comes when."""
_NO_ORDER = (
    "data.num_workers",
    "data.skip_samples",  # holds from where the run stands
    "data.valid_data_path",
    "data.test_data_path",
    "data.eod_mask_loss",
    "data.reset_position_ids",
    "data.reset_attention_mask",
)
_NOBODYS = ("default", "derived")


@dataclass(frozen=True)
class SavedRun:
    """The config that a checkpoint keeps."""

    name: str
    """Of the checkpoint, such as `global_step100`."""
    config: Mapping[str, Any]
    origins: Mapping[str, str]
    """JSON path to where the value was written."""

    def chosen(self) -> dict[str, Any]:
        """The values that somebody wrote, by JSON path, of the sections that are inherited."""
        return {
            path: value
            for path, value in leaves({key: self.config[key] for key in _INHERITED})
            if self.origins.get(path, "default") not in _NOBODYS
        }


def resume_config(
    path: str | Path,
    overrides: Iterable[str],
    world_size: int | None,
    *,
    check_files: bool,
    saved: SavedRun,
) -> LoadedConfig:
    """What `load_config` returns, with the saved run's values beneath; `notes` lists differences.

    Raises ConfigError where the config is at fault by itself, is another model's, or has other data
    and checkpoint.changed_data does not say what that means. A saved value that the new config
    leaves without a use, or makes impossible, is let go.
    """
    overrides, values = list(overrides), saved.chosen()
    origin = f"checkpoint {saved.name}"
    while True:
        try:
            loaded = load_config(
                path,
                overrides,
                world_size,
                check_files=check_files,
                beneath=_tree(values, origin),
            )
            break
        except ConfigError as error:
            in_the_way = [p.path for p in error.problems if p.origin == origin]
            if not in_the_way or not values.keys() & set(in_the_way):
                raise
            values = {key: value for key, value in values.items() if key not in in_the_way}
    problems = _refused(saved, loaded)
    if problems:
        raise ConfigError(problems)
    return replace(loaded, notes=[*_inherited(loaded, origin), *_accepted(saved, loaded)])


def data_differ(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two resolved configs read other samples, or the same ones in another order."""
    return any(_is_order(path) for path, _, _ in _differing(saved, now))


def _is_order(path: str) -> bool:
    return path in _ORDER or (path.startswith("data.") and path not in _NO_ORDER)


def _is_model(path: str) -> bool:
    return path.startswith("model.") and path not in (*_ANY_MODEL, *_ORDER)


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """JSON path, saved value and present value where they differ; a new key is no difference."""
    before = dict(leaves({key: saved[key] for key in COMPARED}))
    for path, value in leaves({key: now[key] for key in COMPARED}):
        if path in before and before[path] != value:
            yield path, before[path], value


def _refused(saved: SavedRun, loaded: LoadedConfig) -> list[Problem]:
    checkpoint = loaded.config.checkpoint
    if checkpoint.finetune:
        return []  # the shapes are compared when the weights are loaded
    problems = []
    for path, before, value in _differing(saved.config, resolved_dict(loaded.config)):
        held = f"is {show(before)} in {saved.name}"
        origin = loaded.origins.get(path, "")
        if _is_model(path):
            nearest = "leave it as it was, or start a new run with checkpoint.finetune"
            problems.append(Problem(path, value, f"{held}: another model", nearest, origin))
        elif _is_order(path) and checkpoint.changed_data == "stop":
            nearest = (
                'set checkpoint.changed_data to "continue" to go on where each source stands, or '
                'to "restart" to read these from their beginning'
            )
            problems.append(Problem(path, value, f"{held}: other data", nearest, origin))
    return problems


def _inherited(loaded: LoadedConfig, origin: str) -> Iterator[str]:
    for path, value in leaves(resolved_dict(loaded.config)):
        if loaded.origins[path] == origin:
            yield f"{path}: {show(value)}, as in the {origin}"


def _accepted(saved: SavedRun, loaded: LoadedConfig) -> Iterator[str]:
    for path, before, value in _differing(saved.config, resolved_dict(loaded.config)):
        yield f"{path}: {show(before)} in {saved.name}, now {show(value)}"


def _tree(values: Mapping[str, Any], origin: str) -> Tree:
    """Values by JSON path as a tree to lay others over."""
    tree = Tree()
    for path, value in values.items():
        *above, key = path.split(".")
        place = tree.values
        for name in above:
            place = place.setdefault(name, {})
        place[key] = value
        tree.origins[path] = origin
    return tree
