"""Line charts as one SVG file, which any browser shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 44
_TICKS = 5
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#57534e")
_MARKED = 16  # points of a line, at most, that are marked: so few are measurements, and one alone makes no line
_TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'


@dataclass(frozen=True)
class Line:
    """``points``: (x, y), ascending in x."""

    points: Sequence[tuple[float, float]]
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """Both axes begin at 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def page(title: str, charts: Sequence[Chart], *, columns: int = 2) -> str:
    rows = -(-len(charts) // columns)
    width, height = columns * WIDTH, 40 + rows * HEIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}"><rect width="100%" height="100%" fill="white"/>',
             f'<text x="16" y="26" {_TEXT} font-weight="bold">{escape(title)}</text>']
    for index, chart in enumerate(charts):
        x, y = index % columns * WIDTH, 40 + index // columns * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_chart(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines for point in line.points]
    x_end = _round_up(max((x for x, _ in points), default=1.0))
    y_end = _round_up(max((y for _, y in points), default=1.0))
    across, down = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="20" {_TEXT} font-weight="bold">{escape(chart.title)}</text>']
    for tick in range(_TICKS + 1):
        x, y = _LEFT + across * tick / _TICKS, _TOP + down * (1 - tick / _TICKS)
        parts += [f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + across}" y2="{y:.1f}" stroke="#ddd"/>',
                  f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" {_TEXT} text-anchor="end">{y_end * tick / _TICKS:g}</text>',
                  f'<text x="{x:.1f}" y="{_TOP + down + 16}" {_TEXT} text-anchor="middle">'
                  f'{x_end * tick / _TICKS:g}</text>']
    parts += [f'<text x="{_LEFT + across / 2}" y="{HEIGHT - 10}" {_TEXT} text-anchor="middle">'
              f'{escape(chart.x_label)}</text>',
              f'<text transform="translate(14 {_TOP + down / 2}) rotate(-90)" {_TEXT} text-anchor="middle">'
              f'{escape(chart.y_label)}</text>']
    for number, line in enumerate(chart.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{_LEFT + across * x / x_end:.1f},{_TOP + down * (1 - y / y_end):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(line.points) <= _MARKED:
            parts += [f'<circle cx="{place.partition(",")[0]}" cy="{place.partition(",")[2]}" r="2.5" fill="{colour}"/>'
                      for place in path.split()]
        if line.name:
            parts.append(f'<text x="{_LEFT + across - 4}" y="{_TOP + 14 + 14 * number}" {_TEXT} text-anchor="end" '
                         f'style="fill:{colour}">{escape(line.name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """To a short number, so that ticks are short too."""
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
