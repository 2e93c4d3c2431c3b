"""Numbers that go wrong: what is not finite, a loss that jumps, copies that differ."""
