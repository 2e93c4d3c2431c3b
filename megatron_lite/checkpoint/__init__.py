"""Checkpoints as boxes of logical tensors: safetensors and JSON, nothing bound to a layout."""
