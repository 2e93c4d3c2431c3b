"""Checkpoints of other programs ↔ ours. Called by tools/convert_checkpoint.py, imported by none."""
