"""Memory of an import from DeepSpeed and of an export: some tensors, never a whole model."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.convert import foreign, universal, zero
from megatron_lite.convert.target import Target
from tests.distributed.models import LLAMA, write_config
from tests.distributed.ranks import on_ranks
from tests.zero_checkpoints import write

WIDER = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 704, "vocab_size": 4000}


class Growth:
    """The most memory beyond that at the beginning, in bytes, without pages of mapped files."""

    def __init__(self) -> None:
        self._first = self._now()
        self.most = 0

    def __call__(self, count: int = 0) -> None:
        """Look, as what a tensor that was just written is told to."""
        self.most = max(self.most, self._now() - self._first)

    def _now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError("/proc/self/status has no RssAnon")


def convert(folder: Path) -> tuple[int, int, int]:
    """Bytes of the numbers, and growth of an import and of an export, in a process of its own."""
    target = Target.read(folder / "run.json")
    importing = Growth()
    found = zero.read(folder / "theirs", target)
    importing()
    ours = foreign.write(folder / "ours", target, found, progress=importing)
    size = foreign.size(target, found)
    del found
    exporting = Growth()
    universal.export(ours, folder / "back", progress=exporting)
    return size, importing.most, exporting.most


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    write(
        tmp_path / "theirs",
        Target.read(write_config(tmp_path / "run.json", tmp_path / "none", LLAMA | WIDER)),
    )
    ((size, importing, exporting),) = on_ranks(1, convert, tmp_path)
    assert size > 90e6
    assert importing < size / 4, f"{importing} bytes, of {size}"
    assert exporting < size / 4, f"{exporting} bytes, of {size}"
