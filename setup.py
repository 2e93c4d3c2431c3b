"""Installation of megatron_lite; direct dependencies are pinned, so that a run can be repeated."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_lite/__init__.py").read_text())
assert VERSION is not None

REQUIREMENTS = [
    "torch==2.13.0",
    "deepspeed==0.19.8",
    "ninja==1.13.2",  # compiles DeepSpeed's CPU Adam
    "sentencepiece==0.2.3",
    "tokenizers==0.23.3",
    "tensorboard==2.21.0",
    "pillow==13.0.0",  # pictures of schedules; tensorboard needs it too
    "pydantic==2.14.4",
    "jinja2==3.1.6",  # chat templates; torch needs it too
    "safetensors==0.8.0",
    "xxhash==4.1.0",
    "numpy==2.4.6",
    "tqdm==4.70.1",
    "orjson==3.13.0",
    "zstandard==0.25.0",
]
EXTRAS = {
    "gigatoken": ["gigatoken==0.10.0"],  # a faster byte-level BPE, compared with tokenizers
    "columns": ["pyarrow==26.0.1", "datasets==5.2.0"],  # Parquet, Arrow, data sets on disk
}
TEST_REQUIREMENTS = [
    "pytest==9.2.0",
    "hypothesis==6.170.17",
    "transformers==5.24.0",
    "psutil==7.2.2",
    "megatron-core==0.16.1",  # its reader, index builder and model judge ours
    "ruff==0.17.6",
    "mypy==2.4.1",
    "pre-commit==4.7.0",
    *(requirement for extra in EXTRAS.values() for requirement in extra),
]

setup(
    name="megatron_lite",
    version=VERSION[1],
    description="Train language models on many devices, from one checked JSON file.",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    install_requires=REQUIREMENTS,
    extras_require={"test": TEST_REQUIREMENTS, **EXTRAS},
)
