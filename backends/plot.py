"""A profile as a picture: a small panel for each dims and number of heads, in SVG and without a plotting library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from mla_prefill.backends.bench import lengths_text, tflops
from mla_prefill.capabilities.profiles import Profile, Reading

PANEL_W, PANEL_H = 300, 170
LEFT, TOP, RIGHT, BOTTOM = 46, 30, 12, 72
HEAD = 60
#: Okabe and Ito's colours, which colour-blind readers can tell apart; beyond eight kernels the dashes differ.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def svg(profile: Profile) -> str:
    """Throughput of eager calls over the shapes."""
    kernels = list(dict.fromkeys(r.kernel for r in profile.readings))
    rows = list(dict.fromkeys(r.dims for r in profile.readings))
    columns = list(dict.fromkeys(r.heads for r in profile.readings))
    shapes = list(dict.fromkeys(r.lengths for r in profile.readings))
    width = max(560, 20 + len(columns) * (LEFT + PANEL_W + RIGHT))
    height = HEAD + len(rows) * (TOP + PANEL_H + BOTTOM)
    title = f"{profile.gpu or profile.arch}, {profile.dtype}, {profile.date}: eager TFLOP/s, causal, LSE"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 20, title, 14),
        *_legend(kernels),
    ]
    for i, dims in enumerate(rows):
        for j, heads in enumerate(columns):
            readings = [r for r in profile.readings if (r.dims, r.heads) == (dims, heads)]
            x, y = 12 + j * (LEFT + PANEL_W + RIGHT) + LEFT, HEAD + i * (TOP + PANEL_H + BOTTOM) + TOP
            parts += _panel(x, y, f"{dims}, {heads} heads", readings, kernels, shapes)
    return "\n".join([*parts, "</svg>\n"])


def _legend(kernels: Sequence[str]) -> Iterator[str]:
    x = 12
    for index, kernel in enumerate(kernels):
        yield f'<path d="M{x} 40h22" {_stroke(index)}/>'
        yield _text(x + 27, 44, kernel)
        x += 42 + 7 * len(kernel)


def _panel(
    x: int, y: int, title: str, readings: Sequence[Reading], kernels: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> Iterator[str]:
    speed = {(r.kernel, r.lengths): tflops(r.dims, r.lengths, r.heads) / (r.eager_us * 1e-6) for r in readings}
    top = max(speed.values(), default=1.0) * 1.05
    step = PANEL_W / max(1, len(shapes) - 1)
    yield _text(x, y - 8, title, weight="bold")
    for tick in _ticks(top):
        at = y + PANEL_H * (1 - tick / top)
        yield f'<path d="M{x} {at:.1f}h{PANEL_W}" stroke="#ddd"/>' + _text(x - 6, at + 4, f"{tick:g}", anchor="end")
    for index, lengths in enumerate(shapes):
        at = x + index * step
        turn = f' transform="rotate(-35 {at:.1f} {y + PANEL_H + 14})"'
        yield _text(at, y + PANEL_H + 14, lengths_text(lengths), anchor="end", more=turn)
    for number, kernel in enumerate(kernels):
        points = [
            (x + index * step, y + PANEL_H * (1 - speed[kernel, lengths] / top))
            for index, lengths in enumerate(shapes)
            if (kernel, lengths) in speed
        ]
        if points:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            yield f'<polyline points="{line}" {_stroke(number)}/>'
            yield from (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="{_colour(number)}"/>' for px, py in points)


def _ticks(top: float) -> list[float]:
    """About four round numbers up to ``top``."""
    size = 10.0 ** (len(str(int(top))) - 1) if top >= 1 else 10.0 ** -len(f"{1 / top:.0f}")
    unit = next(size * m for m in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10) if top / (size * m) <= 5)
    return [unit * i for i in range(int(top / unit) + 1)]


def _text(
    x: float, y: float, text: str, size: int = 11, anchor: str = "start", weight: str = "", more: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{bold}{more}>{escape(text)}</text>'


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _stroke(index: int) -> str:
    dashes = ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
    return f'fill="none" stroke="{_colour(index)}" stroke-width="1.8"{dashes}'
