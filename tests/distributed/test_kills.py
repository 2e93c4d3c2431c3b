"""kill -9 at random moments of saves: a whole checkpoint is always there, and none but the newest
steps are lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.numpy import load_file

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.scan import scan, uncovered

KILLS = 20


def test_twenty_kills(tmp_path: Path) -> None:
    moments, last = random.Random(5), 0
    root = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "tests.distributed.saves_without_end", str(root)]
    unfinished = 0
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0.1, 1.2))
            process.send_signal(signal.SIGKILL)
        unfinished += any(root.glob(".global_step*"))
        store.recover(root)
        folder = store.find(root, step=None)
        if folder is None:
            assert last == 0, "before the first save was done"
            continue
        manifest = Manifest.read(folder)
        found = scan(folder, manifest.boxes, files=manifest.files)
        assert found.faults == [] and uncovered(manifest) == []
        assert found.fingerprints.sums == manifest.fingerprints
        values = load_file(folder / "shard_00000.safetensors")
        assert {float(v) for tensor in values.values() for v in (tensor.min(), tensor.max())} == {
            float(manifest.step)
        }
        assert manifest.step >= last, "a step that was there is gone"
        last = manifest.step
    assert last >= 5 and unfinished >= 5, "kills that come between saves show little"
