"""Draws a timeline: a row for each rank, a box for each action, as text, SVG or PNG.

The hue is the micro-batch, warm one way and cool the other where there are two directions; light is
a forward, dark a backward, grey the gradient of weights. A rank's later stages are paler. Called by
tools/pipeline_timeline.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.simulate import Timeline

LEFT, TOP, ROW, GAP, BOTTOM, WIDTH = 64, 34, 28, 5, 44, 1400
"""Pixels: margins, height of a row, space between rows, width of all boxes together."""
LETTER = 7
"""Pixels that a letter is wide, about."""
LIGHTNESS = {"F": 0.74, "B": 0.50, "W": 0.80}
SUFFIXES = (".svg", ".png")
"""The formats of save_picture."""
GOLDEN = 0.618034
"""Steps of this part of the circle keep neighbours apart for any number of colours."""


@dataclass(frozen=True)
class Box:
    """A filled rectangle in pixels with a text in its middle; colours are #rrggbb."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str
    ink: str


@dataclass(frozen=True)
class Text:
    """A text whose left edge and middle are at (x, y)."""

    x: float
    y: float
    text: str


def as_text(schedule: Schedule, timeline: Timeline, columns: int = 100) -> str:
    """A line for each rank, scaled to `columns`: F3 is a forward of micro-batch 3, dots are idle.

    Small letters are a rank's second and later stages. Where a box is too narrow for it all, only
    the letter of its kind is left.
    """
    margin = len(f"rank {schedule.num_ranks - 1} ")
    scale = max(columns - margin, 1) / timeline.makespan
    lines, parts = [], _parts(schedule)
    for rank, row in enumerate(timeline.rows):
        line = ""
        for timed in row:
            start, end = round(timed.start * scale), round(timed.end * scale)
            label = f"{timed.action.kind}{timed.action.micro_batch}"
            direction = schedule.directions[timed.action.micro_batch]
            if parts[rank, direction, timed.action.stage] > 0:
                label = label.lower()
            label = label if len(label) < end - start else label[0]
            line = line.ljust(start, ".") + label[: end - start].ljust(end - start, "-")
        lines.append(f"rank {rank}".ljust(margin) + line.ljust(columns - margin, "."))
    return "\n".join(lines)


def save_picture(path: Path, schedule: Schedule, timeline: Timeline, title: str) -> None:
    """Write the picture in the format that the name asks for.

    Raises ValueError for a name that ends in neither .svg nor .png.
    """
    if path.suffix == ".svg":
        path.write_text(_svg(schedule, timeline, title), encoding="utf-8")
    elif path.suffix == ".png":
        _save_png(path, schedule, timeline, title)
    else:
        raise ValueError(f"{path}: a picture's name ends in .svg or .png")


def _svg(schedule: Schedule, timeline: Timeline, title: str) -> str:
    width, height = _size(schedule)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for box in _boxes(schedule, timeline):
        lines.append(
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}"'
            f' height="{box.height}" fill="{box.fill}" stroke="#ffffff" stroke-width="0.5"/>'
        )
        if box.label:
            lines.append(
                f'<text x="{box.x + box.width / 2:.2f}" y="{box.y + box.height / 2:.2f}"'
                f' fill="{box.ink}" text-anchor="middle" dominant-baseline="central">'
                f"{box.label}</text>"
            )
    for text in _texts(schedule, timeline, title):
        lines.append(
            f'<text x="{text.x:.2f}" y="{text.y:.2f}" fill="#222222"'
            f' dominant-baseline="central">{escape(text.text)}</text>'
        )
    return "\n".join([*lines, "</svg>\n"])


def _save_png(path: Path, schedule: Schedule, timeline: Timeline, title: str) -> None:
    from PIL import Image, ImageDraw, ImageFont  # pictures alone need it, schedules do not

    image = Image.new("RGB", _size(schedule), "#ffffff")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
    for box in _boxes(schedule, timeline):
        corners = (box.x, box.y, box.x + box.width, box.y + box.height)
        draw.rectangle(corners, fill=box.fill, outline="#ffffff")
        middle = (box.x + box.width / 2, box.y + box.height / 2)
        draw.text(middle, box.label, fill=box.ink, font=font, anchor="mm")
    for text in _texts(schedule, timeline, title):
        draw.text((text.x, text.y), text.text, fill="#222222", font=font, anchor="lm")
    image.save(path)


def _size(schedule: Schedule) -> tuple[int, int]:
    return LEFT + WIDTH + LEFT // 2, TOP + schedule.num_ranks * (ROW + GAP) + BOTTOM


def _boxes(schedule: Schedule, timeline: Timeline) -> Iterator[Box]:
    scale = WIDTH / timeline.makespan
    parts, turns = _parts(schedule), _turns(schedule)
    for rank, row in enumerate(timeline.rows):
        y = TOP + rank * (ROW + GAP)
        for timed in row:
            width = (timed.end - timed.start) * scale
            label = str(timed.action.micro_batch)
            direction = schedule.directions[timed.action.micro_batch]
            part = parts[rank, direction, timed.action.stage]
            fill = _colour(schedule, timed.action, part, turns[timed.action.micro_batch])
            yield Box(
                x=LEFT + timed.start * scale,
                y=y,
                width=width,
                height=ROW,
                fill=fill,
                label=label if len(label) * LETTER < width else "",
                ink=_ink(fill),
            )


def _texts(schedule: Schedule, timeline: Timeline, title: str) -> Iterator[Text]:
    yield Text(LEFT, TOP / 2, title)
    for rank in range(schedule.num_ranks):
        yield Text(8, TOP + rank * (ROW + GAP) + ROW / 2, f"rank {rank}")
    foot = TOP + schedule.num_ranks * (ROW + GAP) + 10
    for tenth in range(0, 11, 2):
        at = timeline.makespan * tenth / 10
        yield Text(LEFT + WIDTH * tenth / 10 - 2, foot, f"{at:g}")
    directions = "; warm down, cool up" if len(schedule.placements) > 1 else ""
    weights = ", grey weights' gradient" if schedule.split_backward else ""
    legend = f"hue and number: micro-batch{directions}; light forward, dark backward{weights}"
    yield Text(LEFT, foot + 18, legend)


def _colour(schedule: Schedule, action: Action, part: int, turn: int) -> str:
    direction = schedule.directions[action.micro_batch]
    ways = len(schedule.placements)
    hue = direction / ways - 0.06 + (turn * GOLDEN) % 1 * (0.9 if ways == 1 else 0.6 / ways)
    saturation = 0.12 if action.kind == "W" else 0.75
    paler = 0.1 * min(part, 1) if ways == 1 else 0
    red, green, blue = hls_to_rgb(hue % 1, min(LIGHTNESS[action.kind] + paler, 0.9), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def _ink(fill: str) -> str:
    """White on dark, dark on light."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else "#222222"


def _parts(schedule: Schedule) -> dict[tuple[int, int, int], int]:
    """For (rank, direction, stage) which of the rank's parts of the model it is, 0 the first."""
    return {
        (rank, *held): number
        for rank in range(schedule.num_ranks)
        for number, held in enumerate(schedule.held_by(rank))
    }


def _turns(schedule: Schedule) -> list[int]:
    """The number of each micro-batch within its direction."""
    counted: Counter[int] = Counter()
    turns = []
    for direction in schedule.directions:
        turns.append(counted[direction])
        counted[direction] += 1
    return turns
