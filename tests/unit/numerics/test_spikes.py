"""The rule for losses that jump."""

from __future__ import annotations

from megatron_lite.numerics.spikes import spike_limit


def test_it_waits_for_its_window_and_looks_no_further_back() -> None:
    assert spike_limit([1.0, 2.0], window=3, threshold=1) is None
    assert spike_limit([100.0, 1.0, 2.0, 3.0], window=3, threshold=1) == 2 + 1.4826


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_becomes_the_usual_one() -> None:
    losses = [3.0 + 0.01 * (i % 3) for i in range(20)]
    usual = spike_limit(losses, window=20, threshold=10)
    assert usual is not None and 3.02 < usual < 3.3
    spikes = 0
    while (spike_limit(losses, window=20, threshold=10) or 0.0) < 9.0:
        losses.append(9.0)
        spikes += 1
    assert spikes in (10, 11)
