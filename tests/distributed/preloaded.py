"""Imported once by the process that test ranks are forked from: everything slow to start.

Beside imports that is DeepSpeed's look for its compiled kernels, which takes a second each, and
their compilation where a machine has none yet, which takes longer than a test may.
"""

# What torch and deepspeed import late, when the first optimizer is made.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import megatron_lite.session  # noqa: F401
import tests.distributed.runs  # noqa: F401
from megatron_lite.engine.deepspeed_setup import compile_kernels

compile_kernels()
