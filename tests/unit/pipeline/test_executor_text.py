"""The executor's text: no schedule's name, nothing about phases of a schedule."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_lite.pipeline import executor, p2p
from megatron_lite.pipeline.classic import gpipe, one_f_one_b
from megatron_lite.pipeline.schedules import SCHEDULES

WORDS = (
    *SCHEDULES,
    gpipe.__name__,
    one_f_one_b.__name__,
    *("warm", "steady", "cool", "drain", "interleave", "chimera", "zero_bubble", "zb"),
)


def words_of(source: str) -> set[str]:
    """Every name and every text of a source, docstrings aside."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        for value in vars(node).values() if id(node) not in texts else ():
            values = value if isinstance(value, list) else [value]
            found |= {v for v in values if isinstance(v, str)}
    return found


def mentions(source: str) -> set[str]:
    return {word for word in words_of(source) for w in WORDS if w in word.lower()}


@pytest.mark.parametrize("module", [executor, p2p], ids=["executor", "p2p"])
def test_the_executor_knows_no_schedule(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    assert mentions(source) == set()
    assert not any(word.endswith("schedules") for word in words_of(source)), "it imports them"
    assert "Message" in words_of(source)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("if schedule.name == '1f1b': pass", {"1f1b"}),
        ("warm_up = min(stages - stage, count)", {"warm_up"}),
        ("def run_cooldown(): pass", {"run_cooldown"}),
        ("from pipeline.schedules import gpipe", {"gpipe"}),
        ("def f(num_warmup): pass", {"num_warmup"}),
        ('"""No warm-up, no 1f1b."""\nx = 1', set()),
    ],
)
def test_the_check_finds_what_it_should(source: str, found: set[str]) -> None:
    assert mentions(source) == found
