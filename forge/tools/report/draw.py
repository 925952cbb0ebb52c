"""Draw figures as SVG with matplotlib, for the report and for image files of scripts.

Importing this module raises MissingExtra if matplotlib is missing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forge.runtime.errors import MissingExtra
from forge.runtime.terminal import printable
from forge.tools.report.read import Points

try:
    import matplotlib
except ModuleNotFoundError:
    raise MissingExtra("figures are drawn by matplotlib: pip install 'forge[report]'") from None
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Colour of the part `absent` of a bar, e.g. downtime.
ABSENT = "#999999"
# The colours of Okabe and Ito are distinct for all kinds of colour vision. Dashes keep curves apart in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text, for search and screen readers
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444",
    "ytick.color": "#444",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}
WIDE, HALF = (10.4, 3.0), (5.2, 2.7)


@dataclass(frozen=True)
class Curve:
    """A named curve. points: (x values, y values). color: index into COLORS. run: index into DASHES."""

    name: str
    points: Points | tuple[list[float], list[float]]
    color: int = 0
    run: int = 0


@dataclass(frozen=True)
class Mark:
    """An event, drawn as a vertical line at its step. kind: one of MARKS."""

    step: float
    kind: str


MARKS = {
    "restart": ("#555555", ":"),
    "skipped": ("#D55E00", "--"),
    "spike": ("#E69F00", "--"),
    "rolled back": ("#b00020", "-"),
    "slow rank": ("#CC79A7", "-."),
    "watchdog": ("#b00020", "-."),
    "failed": ("#b00020", "-"),
}


def _plain(text: str) -> str:
    """Return `text` in a form that matplotlib shows literally: escaped dollar signs, no control characters."""
    return printable(text).replace("$", r"\$")


def curves(
    key: str,
    drawn: Sequence[Curve],
    unit: str,
    *,
    size: tuple[float, float] = HALF,
    log: bool = False,
    marks: Sequence[Mark] = (),
    share: bool = False,
    x: str = "step",
    levels: Sequence[tuple[str, float]] = (),
    log_x: bool = False,
) -> str:
    """Draw curves over steps. Return an SVG element.

    key: prefix of the ids in the SVG. x, unit: labels of the axes. size: width and height in inches. log, log_x:
    logarithmic y and x axis. share: values are fractions; show them in per cent, on an axis from 0. marks: events, as
    vertical lines. levels: (name, value) of dashed horizontal lines.
    """
    with matplotlib.rc_context(STYLE):
        outside = len(drawn) > 6
        figure = new_figure(
            *size, right=1.5 if outside else 0.12, top=0.22
        )  # room for a factor above the axis, e.g. 1e30
        axes = figure.add_subplot()
        for curve in drawn:
            steps, values = curve.points
            values = [100 * value for value in values] if share else values
            style = {"color": COLORS[curve.color % len(COLORS)], "linestyle": DASHES[curve.run % len(DASHES)]}
            points = {"marker": "o", "markersize": 3} if len(steps) < 20 else {}
            axes.plot(steps, values, label=_plain(curve.name), **style, **points)  # type: ignore[arg-type]
        if log and any(value > 0 for curve in drawn for value in curve.points[1]):
            axes.set_yscale("log")
        elif share:
            axes.set_ylim(bottom=0)
        if log_x:
            axes.set_xscale("log")
        _mark(axes, marks)
        for name, value in levels:
            axes.axhline(value, color="#888888", linestyle="--", linewidth=1.0)
            at_end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 8}
            axes.annotate(_plain(name), (1.0, value), **at_end)  # type: ignore[arg-type]
        axes.set_ylabel(_plain(unit))
        axes.set_xlabel(_plain(x))
        if len(drawn) > 1 or marks:
            place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if outside else {}
            axes.legend(**place)
        return as_svg(figure, key)


def _mark(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw events as vertical lines. The legend has one entry per kind of event."""
    named: set[str] = set()
    for mark in marks:
        color, dash = MARKS[mark.kind]
        name = None if mark.kind in named else mark.kind
        axes.axvline(mark.step, color=color, linestyle=dash, linewidth=1.0, alpha=0.8, label=name)
        named.add(mark.kind)


@dataclass(frozen=True)
class Heat:
    """A map for `heat_maps`: `rows` (e.g. layers) over `steps`. values: `[rows, steps]`, NaN if missing."""

    title: str
    rows: Sequence[str]
    steps: Sequence[int]
    values: np.ndarray


def heat_maps(key: str, maps: Sequence[Heat], unit: str, *, log: bool = True, even: bool = False) -> str:
    """Draw maps side by side, with one colour scale. Return an SVG element.

    key: prefix of the ids in the SVG. log: logarithmic colour scale. even: values are multiples of an even share; the colour
    scale is logarithmic, white at 1, blue below, red above.
    """
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    tall = max(len(one.rows) for one in maps)
    every = np.concatenate([one.values[np.isfinite(one.values)].ravel() for one in maps] or [np.zeros(0)])
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False}):
        height = rows * min(4.0, 0.75 + 0.16 * max(tall, 4)) + 0.4
        figure = new_figure(10.4, height, left=0.4, right=1.3, top=0.25)
        spread = {"wspace": 0.12, "hspace": 0.75 if rows > 1 else 0.2}
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=spread)
        norm, colors = _scale(every, log, even)
        image = None
        for place, one in zip(grid.flat, maps, strict=False):
            place.set_title(_plain(one.title))
            edges = _edges(one.steps)
            values = np.log2(np.maximum(one.values, 2.0**-4)) if even else one.values
            image = place.pcolormesh(
                edges,
                np.arange(len(one.rows) + 1) - 0.5,
                np.ma.masked_invalid(values),
                norm=norm,
                cmap=colors,
                edgecolors="face",  # without edges, browsers show gaps between the cells
                linewidth=0.3,
                rasterized=values.size > 4000,
            )
            place.invert_yaxis()
            shown = range(0, len(one.rows), max(1, -(-len(one.rows) // 16)))
            place.set_yticks(list(shown), [_plain(one.rows[row]) for row in shown])
            place.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for place in list(grid.flat)[len(maps) :]:
            place.set_axis_off()
        if image is not None:
            bar = figure.colorbar(image, cax=figure.add_axes((1 - 1.15 / 10.4, 0.25, 0.012, 0.5)))
            bar.ax.minorticks_off()
            bar.set_label(_plain(unit))
            if even:
                bar.set_ticks([-2, -1, 0, 1, 2], labels=["1/4", "1/2", "1", "2", "4"])
        figure.supxlabel("step", fontsize=9)
        return as_svg(figure, key)


def _scale(every: np.ndarray, log: bool, even: bool) -> tuple[Normalize, str]:
    if even:
        return Normalize(-2, 2), "RdBu_r"
    positive = every[every > 0]
    if log and positive.size and positive.max() > positive.min():
        return LogNorm(positive.min(), positive.max()), "viridis"
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    return Normalize(low, high if high > low else low + 1), "viridis"


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Return the edges between cells centred at `steps`, with both outer edges, float64 `[steps + 1]`."""
    centres = np.asarray(steps, dtype=float)
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[centres[0] - (middle[0] - centres[0])], middle, [2 * centres[-1] - middle[-1]]])


def shares(key: str, bars: Mapping[str, Mapping[str, float]], unit: str, absent: str) -> str:
    """Draw one horizontal bar per run. Return an SVG element.

    A bar has at most seven coloured parts, and the part `absent` in grey. bars: run -> part -> length in `unit`.
    key: prefix of the ids in the SVG.
    """
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(10.4, 1.0 + 0.45 * len(bars), left=1.1, top=0.4)
        axes = figure.add_subplot()
        left = np.zeros(len(bars))
        colored = [name for name in names if name != absent]
        assert len(colored) <= len(COLORS), f"more parts than colours: {colored}"
        for name in names:
            widths = np.array([parts.get(name, 0.0) for parts in bars.values()])
            axes.barh(
                list(map(_plain, bars)),
                widths,
                left=left,
                label=_plain(name),
                height=0.6,
                color=ABSENT if name == absent else COLORS[colored.index(name)],
                edgecolor="white",
            )
            left += widths
        axes.invert_yaxis()
        axes.set_xlabel(_plain(unit))
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(8, len(names)))
        return as_svg(figure, key)


@dataclass
class Lane:
    """Events of one kind. minutes: times of the events, in minutes since the first start of the run."""

    name: str
    minutes: list[float] = field(default_factory=list)


def lanes(key: str, drawn: Sequence[Lane]) -> str:
    """Draw events as dots over wall-clock time, one lane per kind. Return an SVG element."""
    with matplotlib.rc_context(STYLE):
        figure = new_figure(10.4, 0.7 + 0.26 * len(drawn), left=1.1)
        axes = figure.add_subplot()
        for number, lane in enumerate(drawn):
            color = COLORS[number % len(COLORS)]
            axes.scatter(lane.minutes, [_plain(lane.name)] * len(lane.minutes), s=26, color=color, zorder=3)
        axes.invert_yaxis()
        axes.margins(y=0.12)
        axes.set_xlabel("minutes since the first start")
        return as_svg(figure, key)


def new_figure(
    width: float,
    height: float,
    *,
    left: float = 0.75,
    right: float = 0.12,
    top: float = 0.1,
    bottom: float = 0.42,
) -> Figure:
    """Return an empty figure with fixed margins. All sizes are in inches.

    matplotlib's automatic layout is avoided, because it would take most of the time to make a page.
    """
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    return figure


def as_svg(figure: Figure, key: str) -> str:
    """Return the figure as an SVG element.

    Ids get the prefix `key`, so that figures of one page do not collide. Unused ids are removed, except ids beginning with
    "bar-", which callers set.
    """
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    used = set(re.findall(r"#([\w-]+)", text)) | set(re.findall(r' id="(bar-\w+)"', text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{key}-{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{key}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    return re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1).replace(
        ' width="', ' data-width="', 1
    )
