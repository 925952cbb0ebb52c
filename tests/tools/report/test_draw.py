"""Figures show names unchanged, and parts in distinct colours."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from forge.observe.goodput import KINDS
from forge.tools.report.draw import Curve, Heat, Lane, curves, heat_maps, lanes, shares

NAMES = [r"a$b_{^", r"<b>$x$y", r"data/$\x$", "\x1b[2J", r"a\$b", "plain"]
SHOWN = [name.replace("\x1b", r"\x1b") for name in NAMES]


def texts(svg: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")
    ]


def test_a_name_with_dollars_or_control_characters_is_shown_as_it_is() -> None:
    points = ([1.0, 2.0], [1.0, 2.0])
    drawn = curves(
        "c", [Curve(name, points) for name in NAMES], r"$\unit$", x=r"$\x$", levels=[(r"$\l$", 1.5)]
    )
    assert {*SHOWN, r"$\unit$", r"$\x$", r"$\l$"} <= {*texts(drawn)}
    import numpy as np

    heat = Heat(r"$\t$", NAMES, [1, 2], np.ones((len(NAMES), 2)))
    assert {*SHOWN, r"$\t$", r"$\u$"} <= {*texts(heat_maps("h", [heat], r"$\u$"))}
    assert {*SHOWN} <= {*texts(lanes("l", [Lane(name, [1.0]) for name in NAMES]))}
    bars = shares("s", {name: {name: 1.0} for name in NAMES}, "seconds", absent="down")
    assert {*SHOWN} <= {*texts(bars)}


def test_a_logarithmic_axis_keeps_its_powers_of_ten() -> None:
    drawn = curves("c", [Curve("a$b$", ([1.0, 2.0], [1.0, 1000.0]))], "loss", log=True)
    assert "$" not in "".join(text for text in texts(drawn) if text != "a$b$")


def test_each_kind_of_time_has_a_colour_of_its_own_and_down_is_grey() -> None:
    drawn = shares("s", {"run": {kind: 1.0 for kind in KINDS}}, "seconds", absent="down")
    colors = re.findall(r"(?:fill: (#[0-9a-f]{6}); )?stroke: #ffffff", drawn)  # black is left out
    bars = set(colors)
    assert len(bars) == len(KINDS) and "#999999" in bars


@pytest.mark.parametrize("largest", [1e30, 3.0, 1e-9])
def test_labels_and_the_factor_of_an_axis_are_within_the_figure(largest: float) -> None:
    drawn = curves("c", [Curve("a", ([1.0, 2.0, 3.0], [0.0, largest / 2, largest]))], "nats per token")
    root = ElementTree.fromstring(drawn)
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    places = re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", drawn) + re.findall(
        r"<text [^>]*x=\"([-\d.]+)\" y=\"([-\d.]+)\"", drawn
    )
    assert places
    for x, y in places:
        assert 8 <= float(x) <= width and 8 <= float(y) <= height, (x, y, largest)
