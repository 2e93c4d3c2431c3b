"""Rules on the source tree itself: what may import what, what reads the environment, file sizes.

The rules are data at the top; `violations` and its parts take any tree, so that the tests below can
show on small made-up trees that each rule really refuses something.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_lite"

PURE_PIPELINE = (
    *("actions", "messages", "verify", "simulate", "partition", "schedules", "plan"),
    "causality",
    *("classic", "chimera", "zero_bubble", "greedy", "table_files", "published", "picture"),
)
PURE_HEALTH = (
    *("diagnosis", "examination", "heartbeat", "observation", "peers", "processes", "record"),
    *("stacks", "stopping", "watch", "watchdog"),
)
"""What the doctor reads with, and what must work while torch hangs."""
LEVELS: tuple[tuple[frozenset[str], ...], ...] = (
    # Each level is a tuple of units; modules of one unit may import each other.
    # The config's rules ask the schedules what sizes they are for.
    (frozenset({f"pipeline.{m}" for m in PURE_PIPELINE}),),
    (
        frozenset({"config"}),
        frozenset({"sharding"}),
        frozenset({"outcome"}),
        frozenset({"code_hash"}),
        frozenset({"json_lines"}),
        frozenset({"occupancy"}),
        frozenset({"command"}),
        frozenset({"progress"}),
        frozenset({"rendezvous"}),
        frozenset({"hostfile"}),
    ),
    (
        frozenset({"mpu"}),
        frozenset({"monitoring"}),
        frozenset({"health"}),
        frozenset({"numerics"}),
        frozenset({"sbatch_options"}),
        frozenset({"submissions"}),
    ),
    (
        frozenset({"layers"}),
        frozenset({"data"}),
        frozenset({"pipeline.executor", "pipeline.p2p"}),
        frozenset({"checkpoint"}),
    ),
    (frozenset({"models"}),),
    (frozenset({"engine"}),),
    (frozenset({"convert"}),),
    (
        frozenset({"trainer", "report", "stage_report", "boards", "run_texts", "resume", "saving"})
        | {"guard", "forensics", "findings", "rewinding", "replica_check", "hidden_shape"},
        frozenset({"life"}),
    ),
    (frozenset({"build_model"}),),
    (frozenset({"build"}),),
    (frozenset({"ending"}),),
    (frozenset({"session"}),),
    (frozenset({"train"}),),
    (frozenset({"slurm"}),),
)
PURE = (
    "config",
    "sharding",
    "outcome",
    "code_hash",
    "json_lines",
    "occupancy",
    "command",
    "rendezvous",
    "sbatch_options",
    "submissions",
    *(f"health.{m}" for m in PURE_HEALTH),
    "hostfile",
    "mpu.grid",
    "mpu.host_memory",
    *(f"pipeline.{m}" for m in PURE_PIPELINE),
)
"""Modules that must load where torch is not installed."""
DEEPSPEED = ("engine.deepspeed_setup",)
ENVIRONMENT = ("train", "session", "slurm")
TOOLS_MAY_IMPORT = (
    "config",
    "data",
    "checkpoint",
    "convert",
    "sharding",
    "progress",
    *PURE,
)
LONGEST_FILE = 400


def modules(root: Path, package: str = PACKAGE) -> dict[str, Path]:
    """Every module of the package under `root`, by its dotted name without the package's."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root / package).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(path: Path, known: Collection[str] = ()) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in the file it does.

    `from a import b` counts as a.b where that is one of the `known` modules.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def own_imports(path: Path, names: set[str]) -> Iterator[str]:
    """The modules of the package that a file imports, without the package's name."""
    full = {f"{PACKAGE}.{name}" for name in names if name}
    for name in imports(path, full):
        if name.split(".")[0] == PACKAGE:
            yield name.removeprefix(PACKAGE).removeprefix(".")


def within(module: str, names: tuple[str, ...] | frozenset[str]) -> bool:
    """True where `module` is one of `names` or lies in one of them."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def place(module: str) -> tuple[int, frozenset[str]] | None:
    """Level and unit of a module; None for an `__init__` that groups several units."""
    for level, units in enumerate(LEVELS):
        for unit in units:
            if within(module, unit):
                return level, unit
    return None


def upward_imports(root: Path) -> list[str]:
    """Imports that do not go down, and modules that the table of levels does not know."""
    found, tree = [], modules(root)
    for module, path in tree.items():
        here = place(module)
        if here is None:
            if module in ("", "pipeline"):
                if targets := sorted(own_imports(path, set(tree))):
                    found.append(f"{module or PACKAGE}: a grouping package imports {targets}")
            else:
                found.append(f"{module}: not in the table of levels")
            continue
        for target in own_imports(path, set(tree)):
            there = place(target)
            if there is None:
                found.append(f"{module} imports {target or PACKAGE}, which has no level")
            elif there[1] != here[1] and there[0] >= here[0]:
                found.append(f"{module} (level {here[0]}) imports {target} (level {there[0]})")
    return found


def foreign_imports(root: Path, library: str, allowed: tuple[str, ...]) -> list[str]:
    """Modules outside `allowed` that import `library`."""
    return [
        module
        for module, path in modules(root).items()
        if not within(module, allowed)
        and any(name.split(".")[0] == library for name in imports(path))
    ]


def impure_modules(root: Path) -> list[str]:
    """Pure modules that import torch, themselves or by way of a module that they import."""
    tree = modules(root)
    reach = {m: {t for t in own_imports(p, set(tree)) if t in tree} for m, p in tree.items()}
    torch = {m for m, p in tree.items() if any(n.split(".")[0] == "torch" for n in imports(p))}
    grown = True
    while grown:
        larger = torch | {m for m, targets in reach.items() if targets & torch}
        grown, torch = larger != torch, larger
    return sorted(m for m in torch if within(m, PURE))


def tools_imports(root: Path) -> list[str]:
    """Imports of tools that reach above data and checkpoints, but for the converter."""
    names = set(modules(root))
    return [
        f"{path.name} imports {target}"
        for path in sorted((root / "tools").glob("*.py"))
        for target in own_imports(path, names)
        if not within(target, TOOLS_MAY_IMPORT)
    ]


def global_statements(root: Path) -> list[str]:
    """Every `global` statement."""
    return [
        f"{module}:{node.lineno}"
        for module, path in modules(root).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]


def environment_reads(root: Path) -> list[str]:
    """Uses of the process environment outside the modules that start a process."""
    found = []
    for module, path in modules(root).items():
        if within(module, ENVIRONMENT):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
            used = isinstance(node, ast.Attribute) and node.attr in names
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                used = any(alias.name in names for alias in node.names)
            if used:
                found.append(f"{module}:{node.lineno}")
    return found


def long_files(root: Path) -> list[str]:
    """Python files above the limit, tests and tools included."""
    counts = {
        path.relative_to(root): len(path.read_text().splitlines())
        for folder in (PACKAGE, "tools", "tests", "launch")
        for path in (root / folder).rglob("*.py")
    }
    return [f"{path}: {lines} lines" for path, lines in counts.items() if lines > LONGEST_FILE]


def test_imports_go_down() -> None:
    assert upward_imports(ROOT) == []


def test_pure_modules_reach_no_torch() -> None:
    assert impure_modules(ROOT) == []


def test_pure_modules_load_without_torch() -> None:
    names = [f"{PACKAGE}.{m}" for m in modules(ROOT) if within(m, PURE)]
    assert len(names) > 30
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'deepspeed', 'numpy'}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_one_file_imports_deepspeed() -> None:
    assert foreign_imports(ROOT, "deepspeed", DEEPSPEED) == []
    assert foreign_imports(ROOT, "deepspeed", ()) == list(DEEPSPEED)


def test_tools_stay_below_models() -> None:
    assert tools_imports(ROOT) == []


def test_nothing_imports_the_converter() -> None:
    tree = modules(ROOT)
    users = [
        m
        for m, path in tree.items()
        if any(within(t, ("convert",)) for t in own_imports(path, set(tree)))
    ]
    assert [m for m in users if not within(m, ("convert",))] == []


def test_no_global_state() -> None:
    assert global_statements(ROOT) == []


def test_environment_is_read_at_the_entry_only() -> None:
    assert environment_reads(ROOT) == []


def test_files_are_short() -> None:
    assert long_files(ROOT) == []


def fake(root: Path, files: dict[str, str]) -> Path:
    """A made-up project."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mpu/groups.py", "from megatron_lite.layers.linear import Linear"),
        ("mpu/groups.py", "from megatron_lite.monitoring import timers"),
        ("layers/linear.py", "import megatron_lite.data.loader"),
        ("checkpoint/save.py", "def f():\n    from megatron_lite.layers.context import placement"),
        ("pipeline/verify.py", "from megatron_lite.pipeline.executor import Program"),
        ("trainer.py", "from megatron_lite import build"),
        ("pipeline/__init__.py", "from megatron_lite.pipeline.executor import Program"),
        ("misc/helpers.py", ""),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, text: str) -> None:
    modules_there = ("layers/linear", "monitoring/timers", "build", "pipeline/executor")
    files = {f"{PACKAGE}/{m}.py": "" for m in modules_there} | {f"{PACKAGE}/{name}": text}
    assert len(upward_imports(fake(tmp_path, files))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layers/linear.py", "from megatron_lite.mpu import groups\nimport torch"),
        ("layers/linear.py", "from megatron_lite.layers.norm import Norm"),
        ("pipeline/executor.py", "from megatron_lite.pipeline.verify import verify"),
        ("trainer.py", "from megatron_lite.report import Reporter"),
    ],
)
def test_a_right_import_is_not(tmp_path: Path, name: str, text: str) -> None:
    assert upward_imports(fake(tmp_path, {f"{PACKAGE}/{name}": text})) == []


def test_torch_is_found_behind_other_modules(tmp_path: Path) -> None:
    files = {
        "megatron_lite/config/load.py": "from megatron_lite.config import inner",
        "megatron_lite/config/inner.py": "from megatron_lite.mpu.groups import Group",
        "megatron_lite/mpu/groups.py": "def f():\n    import torch.distributed as dist",
        "megatron_lite/mpu/grid.py": "import math",
    }
    assert impure_modules(fake(tmp_path, files)) == ["config.inner", "config.load"]


def test_other_faults_are_found(tmp_path: Path) -> None:
    files = {
        "megatron_lite/mpu/a.py": "import os\n\ndef f():\n    global x\n    x = os.getenv('')",
        "megatron_lite/mpu/b.py": "from os import environ\nfrom deepspeed.ops import adam",
        "megatron_lite/train.py": "import os\nprint(os.environ)",
        "megatron_lite/data/long.py": "\n" * (LONGEST_FILE + 1),
        "tools/plan.py": "from megatron_lite.trainer import Trainer",
        "tools/good.py": "from megatron_lite.data.loader import MicroBatch",
    }
    root = fake(tmp_path, files)
    assert global_statements(root) == ["mpu.a:4"]
    assert environment_reads(root) == ["mpu.a:5", "mpu.b:1"]
    assert foreign_imports(root, "deepspeed", DEEPSPEED) == ["mpu.b"]
    assert long_files(root) == ["megatron_lite/data/long.py: 401 lines"]
    assert tools_imports(root) == ["plan.py imports trainer"]
