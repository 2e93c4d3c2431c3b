"""The parts of a transformer, each cut over the tensor-parallel group where it gains from it."""
