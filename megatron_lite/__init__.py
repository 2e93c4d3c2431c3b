"""megatron_lite: train language models on many devices, from one checked JSON file."""

__version__ = "0.1.0"
