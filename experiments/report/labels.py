"""Labels beside points, without overlaps. Pixels, so call it on a figure that has been laid out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.transforms import Bbox

_NEAR = 7.0  # points closer than this, in pixels at 100 dpi, share a label
_AROUND = [
    (dx, dy, ha, va)
    for far in (1.0, 1.8, 2.8, 4.0, 5.5)
    for dx, dy, ha, va in (
        (7 * far, 0, "left", "center"),
        (-7 * far, 0, "right", "center"),
        (0, 7 * far, "center", "bottom"),
        (0, -7 * far, "center", "top"),
        (5 * far, 6 * far, "left", "bottom"),
        (5 * far, -6 * far, "left", "top"),
        (-5 * far, 6 * far, "right", "bottom"),
        (-5 * far, -6 * far, "right", "top"),
    )
]

Point = tuple[float, float, str]


def merge_points(axes: Any, points: Sequence[Point]) -> list[Point]:
    """Joins the names of points that lie on top of each other: "exact, forget"."""
    groups: list[tuple[Any, list[Point]]] = []
    for point in points:
        pixel = axes.transData.transform(point[:2])
        for at, group in groups:
            if np.hypot(*(pixel - at)) < _NEAR:
                group.append(point)
                break
        else:
            groups.append((pixel, [point]))
    return [(g[0][0], g[0][1], ", ".join(p[2] for p in g)) for _, g in groups]


def place_labels(
    axes: Any,
    points: Sequence[Point],
    lines: Sequence[tuple[Any, Any]] = (),
    size: float = 7.5,
) -> None:
    """Writes each point's name at the nearest place that no point, label or edge occupies.

    `lines` are upright or level strokes, such as error bars, that labels should leave free too.
    """
    figure = axes.get_figure()
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    pixels = [axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [Bbox.from_extents(px - 5, py - 5, px + 5, py + 5) for px, py in pixels]
    taken += [text.get_window_extent(renderer).padded(1) for text in axes.texts]
    for start, end in lines:
        ax, ay = axes.transData.transform(start)
        bx, by = axes.transData.transform(end)
        taken.append(Bbox.from_extents(min(ax, bx), min(ay, by), max(ax, bx), max(ay, by)).padded(2))
    for x, y, name in points:
        label = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=size)
        best: tuple[float, tuple[Any, ...]] | None = None
        for rank, place in enumerate(_AROUND):
            _put(label, place)
            box = label.get_window_extent(renderer).padded(1)
            cost = sum(_common(box, other) for other in taken) + 10 * _outside(box, frame)
            if best is None or cost < best[0]:
                best = cost, (*place, rank)
            if cost == 0:
                break
        assert best is not None
        _put(label, best[1][:4])
        if best[1][4] >= 8:  # far from its point: a thin line says whose label it is
            axes.annotate(
                "",
                (x, y),
                xytext=best[1][:2],
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "lw": 0.5, "alpha": 0.6, "shrinkB": 3},
            )
        taken.append(label.get_window_extent(renderer).padded(1))


def overlaps(axes: Any) -> int:
    """Pairs of labels that overlap; for tests."""
    renderer = axes.get_figure().canvas.get_renderer()
    boxes = [t.get_window_extent(renderer) for t in axes.texts if t.get_text()]
    return sum(_common(a, b) > 0 for a, b in itertools.combinations(boxes, 2))


def _put(label: Any, place: tuple[Any, ...]) -> None:
    dx, dy, ha, va = place
    label.set(position=(dx, dy), ha=ha, va=va)


def _common(a: Bbox, b: Bbox) -> float:
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(width * height) if width > 0 and height > 0 else 0.0


def _outside(box: Bbox, frame: Bbox) -> float:
    return float(box.width * box.height) - _common(box, frame)
