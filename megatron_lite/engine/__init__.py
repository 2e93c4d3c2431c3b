"""The optimizer step: DeepSpeed behind one small adapter, and what prepares its input."""
