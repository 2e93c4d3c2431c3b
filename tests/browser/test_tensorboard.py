"""What a person sees who opens TensorBoard on a resumed run."""

from __future__ import annotations

from itertools import pairwise

from tests.browser.page import OUTPUT, Card, cards, fetch
from tests.resumed import END, SAVED

BOTH_AXES = (
    "lm loss",
    "lm loss validation",
    "lm loss validation ppl",
    "lm loss test",
    "lm loss test ppl",
    "learning-rate",
    "batch-size",
    "loss-scale",
    "grad-norm",
    "params-norm",
    "num-zeros",
    "world-size",
)
BY_ITERATION = (
    "iteration-time",
    "batch-generator-time",
    "throughput",
    "tokens-per-second",
    "skipped-iterations",
    "nan-iterations",
    "mem-max-allocated-bytes",
    "slowest-rank",
    "slowest-rank-share",
    "slowest-rank-ratio",
    "pipeline-bubble",
    "pipeline-bubble-simulated",
    *(f"{kind}-time/stage {n}" for kind in ("forward", "backward", "idle") for n in (0, 1)),
)
"""Without "mfu", which a CPU has not."""


def points(card: Card) -> list[tuple[float, float]]:
    """The corners of the card's one curve, which must go to the right from each to the next."""
    (curve,) = card.curves
    assert all(a < b for (a, _), (b, _) in pairwise(curve)), card.tag
    return list(curve)


def test_every_tag_is_offered(address: str) -> None:
    found = fetch(address, "timeseries/tags")["scalars"]["runTagInfo"]["."]
    assert sorted(found) == sorted(
        [*BOTH_AXES, *(f"{tag} vs samples" for tag in BOTH_AXES), *BY_ITERATION]
    )


def test_b52_curves_are_drawn_without_loops_or_gaps(address: str) -> None:
    OUTPUT.mkdir(exist_ok=True)
    screenshot = OUTPUT / "tensorboard.png"
    screenshot.unlink(missing_ok=True)
    wanted = {"lm loss": END, "grad-norm": END, "lm loss validation": END // 2, "params-norm": END}
    filtered = f"^({'|'.join(wanted)})( vs samples)?$"
    shown = {
        card.tag: points(card)
        for card in cards(address, tags=filtered, height=2200, screenshot=screenshot)
    }
    expected = {tag + axis: n for tag, n in wanted.items() for axis in ("", " vs samples")}
    assert {tag: len(corners) for tag, corners in shown.items()} == expected
    for tag, corners in shown.items():
        steps = {round(b - a, 2) for (a, _), (b, _) in pairwise(corners)}
        assert max(steps) - min(steps) < 0.1, f"{tag}: steps that are missing leave a longer line"
    assert screenshot.stat().st_size > 50_000
    print(f"screenshot: {screenshot}")


def test_the_text_tab_shows_config_and_layout(address: str) -> None:
    tags = fetch(address, "text/tags")["."]
    assert {"config/text_summary", "environment/text_summary", "layout/text_summary"} <= set(tags)
    shown = fetch(address, "text/text?run=.&tag=config/text_summary")
    assert [text["step"] for text in shown] == [0, SAVED]
    assert "pipeline_model_parallel_size" in shown[-1]["text"] and "<code>" in shown[-1]["text"]
    (*_, layout) = fetch(address, "text/text?run=.&tag=layout/text_summary")
    assert "<table>" in layout["text"] and "stage 1: layers.1" in layout["text"]
