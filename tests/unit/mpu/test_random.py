"""Random streams of one process: which ranks draw alike, and that no stream disturbs another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import REPLICATED, SHARDED, RngStreams, derive_seed

CPU = torch.device("cpu")


def streams_of(rank: int, *, seed: int = 1) -> RngStreams:
    """The streams of one rank of tp 2 × dp 2 × pp 2."""
    streams = RngStreams(CPU)
    streams.seed(seed, Grid(tp_size=2, dp_size=2, pp_size=2, rank=rank))
    return streams


def draws(streams: RngStreams, *names: str) -> list[Tensor]:
    """Four numbers from each of the named streams, one after the other."""
    found = []
    for name in names:
        with streams.use(name):
            found.append(torch.rand(4))
    return found


def first_draws(name: str, **options: int) -> list[tuple[float, ...]]:
    return [tuple(draws(streams_of(rank, **options), name)[0].tolist()) for rank in range(8)]


def test_replicated_regions_draw_alike_on_tensor_ranks_only() -> None:
    found = first_draws(REPLICATED)
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 4


def test_sharded_regions_draw_apart_on_every_rank() -> None:
    assert len({*first_draws(SHARDED), *first_draws(REPLICATED)}) == 8 + 4


def test_another_seed_is_another_run() -> None:
    assert not {*first_draws(SHARDED)} & {*first_draws(SHARDED, seed=2)}
    assert first_draws(SHARDED) == first_draws(SHARDED)


def test_streams_do_not_disturb_each_other() -> None:
    mixed = draws(streams_of(0), REPLICATED, SHARDED, SHARDED, REPLICATED)
    replicated = draws(streams_of(0), REPLICATED, REPLICATED)
    sharded = draws(streams_of(0), SHARDED, SHARDED)
    assert torch.equal(torch.stack(mixed), torch.stack([replicated[0], *sharded, replicated[1]]))
    assert not torch.equal(sharded[0], sharded[1]), "the stream begins anew at every use"


def test_a_stream_goes_on_after_an_error_in_its_block() -> None:
    streams = streams_of(0)
    with pytest.raises(RuntimeError), streams.use(SHARDED):
        torch.rand(4)
        raise RuntimeError
    found = draws(streams, SHARDED, REPLICATED)
    expected = draws(streams_of(0), SHARDED, SHARDED, REPLICATED)[1:]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_states_continue_where_they_were_taken() -> None:
    streams = streams_of(3)
    draws(streams, SHARDED, REPLICATED)
    states = streams.states()
    expected = draws(streams, SHARDED, REPLICATED)
    fresh = RngStreams(CPU)
    fresh.restore(states)
    assert torch.equal(torch.stack(draws(fresh, SHARDED, REPLICATED)), torch.stack(expected))


def test_replay_draws_again_and_leaves_no_trace() -> None:
    streams = streams_of(3)
    states = streams.states()
    first = draws(streams, SHARDED, REPLICATED)
    after = streams.states()
    with streams.replay(states):
        again = draws(streams, SHARDED, REPLICATED)
    assert torch.equal(torch.stack(again), torch.stack(first))
    now = streams.states()
    assert all(torch.equal(now[name], after[name]) for name in after)


def test_derived_seeds_are_fixed_and_distinct() -> None:
    # The number is part of what a run's seed means: a change gives other initial weights.
    assert derive_seed(1234, "layers.0.mlp.up.weight", 0) == 7280481834715115211
    parts = [(1, "a", 0), (1, "a", 1), (1, "b", 0), (11, "a"), (1, "1a"), ("a", 1), (1,)]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
