"""Imported by the process that the ranks of a test are forked from, so that none pays for it.

The kernels are compiled here when a machine has none yet, which takes longer than a test may.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (torch.compile, sympy …)
import torch.utils.tensorboard  # noqa: F401

from megatron_lite.engine.deepspeed_setup import compile_kernels

compile_kernels()
