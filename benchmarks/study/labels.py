"""Labels beside points of a plot, none on top of another."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_DIRECTIONS = 24
_RADII = (9, 16, 24, 34, 46, 60, 76, 94, 114, 136)
"""Distances that are tried, in points."""
_LEADER = 20
"""Distance from which a thin line leads to the point."""


def label(axes: "Axes", points: Sequence[tuple[float, float]], texts: Sequence[str], taken: Sequence["Bbox"]) -> None:
    """Write each text near its point, where it hides no other text, no point, and nothing in `taken` (in pixels)."""
    axes.figure.draw_without_rendering()
    renderer: Any = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    inside, occupied = axes.get_window_extent(renderer), [*taken, *(around(axes, point) for point in points)]
    for index in sorted(range(len(points)), key=lambda i: points[i][::-1], reverse=True):
        note = axes.annotate(
            texts[index], points[index], (0, 0), textcoords="offset points", fontsize="small", zorder=5
        )
        best = None
        for radius, angle in ((r, 2 * math.pi * k / _DIRECTIONS) for r in _RADII for k in range(_DIRECTIONS)):
            _place(note, radius, angle)
            box = note.get_window_extent(renderer)
            hidden = sum(box.overlaps(other) for other in occupied) + 100 * (not _holds(inside, box))
            if best is None or hidden < best[0]:
                best = hidden, radius, angle
            if not hidden:
                break
        assert best is not None
        _place(note, *best[1:])
        occupied.append(note.get_window_extent(renderer))
        if best[1] >= _LEADER:
            axes.annotate(
                "",
                points[index],
                note.xyann,
                xycoords="data",
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
            )


def _place(note: Any, radius: float, angle: float) -> None:
    """At this distance and angle; the text's nearest side faces the point."""
    x, y = radius * math.cos(angle), radius * math.sin(angle)
    note.xyann = (x, y)
    note.set_horizontalalignment("left" if x > 1 else "right" if x < -1 else "center")
    note.set_verticalalignment("bottom" if y > radius / 2 else "top" if y < -radius / 2 else "center")


def around(axes: "Axes", *points: tuple[float, float]) -> "Bbox":
    """The box in pixels around markers at these points."""
    from matplotlib.transforms import Bbox

    return Bbox(axes.transData.transform([min(points), max(points)])).padded(5)


def _holds(outer: "Bbox", inner: "Bbox") -> bool:
    return outer.x0 <= inner.x0 and outer.y0 <= inner.y0 and inner.x1 <= outer.x1 and inner.y1 <= outer.y1
