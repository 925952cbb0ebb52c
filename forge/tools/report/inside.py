"""Sections of the report on the inside of a model: monitors as heat maps, expert loads, text samples."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from forge.tools.report.course import picture
from forge.tools.report.draw import Curve, Heat, heat_maps
from forge.tools.report.parts import PageSection, Part, Picture, Table, TextBlock, sampled
from forge.tools.report.read import RunRecord

SAMPLES = 4
# Group of monitors -> field -> (caption, unit), in the order of the page.
BY_LAYER = {
    "activations": {
        "rms": ("Activations after each block: root mean square", "root mean square"),
        "max": ("Activations after each block: largest", "largest absolute value"),
    },
    "attention": {
        "max_logit": ("Attention: largest logit", "logit"),
        "entropy": ("Attention: entropy", "nats"),
    },
    "units": {
        "dead": ("Feed-forward: dead units", "share of units"),
        "saturated": ("Feed-forward: saturated units", "share of units"),
    },
    "experts": {
        "score_entropy": ("Router: entropy of its scores", "1: even"),
        "load_entropy": ("Router: entropy of the load", "1: even"),
    },
}
BY_MATRIX = {
    "updates": ("Size of an update relative to the weights, by kind of matrix", "update / weights"),
    "gradients": ("Norm of the gradient, by kind of matrix", "L2 norm"),
    "weights": ("Norm of the weights, by kind of matrix", "L2 norm"),
}
LINEAR = {"entropy", "dead", "saturated", "score_entropy", "load_entropy"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def inside_sections(runs: Sequence[RunRecord]) -> list[PageSection]:
    """Return, for each run, the sections on monitors, loss by position, experts and text samples."""
    sections = []
    for number, run in enumerate(runs):
        of = f" ({run.name})" if len(runs) > 1 else ""
        parts = [*_by_matrix(run, number), *_by_layer(run, number)]
        intro = "Layers from top to bottom, steps from left to right. Look for a row unlike its neighbours."
        sections.append(PageSection(f"Inside the model{of}", intro if parts else "", parts))
        sections.append(PageSection(f"By position{of}", parts=_by_position(run, number)))
        sections.append(PageSection(f"Experts{of}", parts=[*expert_pictures(run, number)]))
        sections.append(PageSection(f"What the model wrote{of}", parts=_samples(run)))
    return sections


def _by_matrix(run: RunRecord, number: int) -> list[Part]:
    parts: list[Part] = []
    for group, (caption, unit) in BY_MATRIX.items():
        found = [(step, one[group]) for step, one in run.having("monitors") if group in one]
        if not found:
            continue
        names = list(dict.fromkeys(name for _, values in found for name in values))
        kinds: dict[str, dict[int, str]] = {}
        for name in names:
            if match := _LAYER.fullmatch(name):
                kinds.setdefault(match[2].removesuffix(".weight"), {})[int(match[1])] = name
        steps = [step for step, _ in found]
        maps = [
            Heat(kind, [str(layer) for layer in layers], steps, _grid(found, [layers[one] for one in layers]))
            for kind, layers in ((kind, dict(sorted(layers.items()))) for kind, layers in kinds.items())
        ]
        if not maps:  # e.g. a model of one's own, or only the embedding
            continue
        svg = heat_maps(f"{group}{number}", maps, unit)
        at = sampled(found, 6)
        rows = [[name, *(values.get(name) for _, values in at)] for name in names]
        table = Table(f"{caption} (rows: parameters)", ["", *(f"step {step}" for step, _ in at)], rows)
        parts.append(Picture(caption, svg, table, wide=True))
    return parts


def _grid(found: Sequence[tuple[int, dict[str, float | None]]], names: Sequence[str]) -> np.ndarray:
    cells = [[values.get(name) for _, values in found] for name in names]
    return np.array([[np.nan if cell is None else cell for cell in row] for row in cells], dtype=float)


def _by_layer(run: RunRecord, number: int) -> list[Part]:
    parts: list[Part] = []
    for group, fields in BY_LAYER.items():
        found = [(step, one[group]) for step, one in run.having("monitors") if group in one]
        for field, (caption, unit) in fields.items():
            names = sorted(
                {layer for _, layers in found for layer in layers if field in layers[layer]}, key=int
            )
            if not names:
                continue
            of_field = [
                (step, {name: layers.get(name, {}).get(field) for name in names}) for step, layers in found
            ]
            heat = Heat("", names, [step for step, _ in found], _grid(of_field, names))
            svg = heat_maps(f"{group}-{field}{number}", [heat], unit, log=field not in LINEAR)
            at = sampled(of_field, 6)
            rows = [[f"layer {name}", *(values[name] for _, values in at)] for name in names]
            table = Table(f"{caption}, in {unit}", ["", *(f"step {step}" for step, _ in at)], rows)
            parts.append(Picture(caption, svg, table, wide=True))
    return parts


def _by_position(run: RunRecord, number: int) -> list[Part]:
    found = sampled(list(run.having("positions")), 4)
    drawn = [
        Curve(f"step {step}", (list(range(len(losses))), list(losses)), color)
        for color, (step, losses) in enumerate(found)
        if losses and all(isinstance(loss, float) for loss in losses)
    ]
    if not drawn:
        return []
    made = picture(
        f"positions{number}",
        "Loss by position in the sequence",
        drawn,
        "nats per token",
        x=f"position, in parts of one in {len(drawn[0].points[0])}",
    )
    return [made] if made is not None else []


def expert_pictures(
    run: RunRecord, number: int = 0, levels: Sequence[tuple[str, float]] = ()
) -> list[Picture]:
    """Return pictures of a run's expert loads; none if the metrics have no routers.

    The first picture has a curve for each layer: the load of its fullest expert. The second picture has a map for each
    layer: the loads of all its experts. Without counts in the metrics, the second picture is left out. levels: (name, value)
    of dashed lines in the first picture.
    """
    layers = sorted(run.names("routers"), key=int)
    if not layers:
        return []
    drawn = [
        Curve(f"layer {layer}", run.series("routers", layer, "load_max"), color)
        for color, layer in enumerate(layers)
    ]
    caption, unit = "Most visited expert of each layer", "even shares"
    made = picture(f"load{number}", caption, drawn, unit, size=(10.4, 2.6), levels=levels)
    pictures = [] if made is None else [made]
    counted = [(step, of) for step, of in run.having("routers") if all("counts" in of[one] for one in of)]
    if counted:
        steps = [step for step, _ in counted]
        maps = []
        for layer in layers:
            counts = np.array([of[layer]["counts"] for _, of in counted], dtype=float).T
            load = counts / np.maximum(counts.mean(axis=0, keepdims=True), 1e-9)
            maps.append(Heat(f"layer {layer}", [str(expert) for expert in range(len(load))], steps, load))
        caption = "Load of every expert, relative to an even share"
        rows = [
            [f"{one.title}, expert {row}", *sampled(one.values[row].tolist(), 8)]
            for one in maps
            for row in range(len(one.rows))
        ]
        table = Table(caption, ["", *(f"step {step}" for step in sampled(steps, 8))], rows)
        drawing = heat_maps(f"experts{number}", maps, unit, even=True)
        pictures.append(Picture(caption, drawing, table, wide=True))
    return pictures


def _samples(run: RunRecord) -> list[Part]:
    return [
        TextBlock(f"after step {step}: {name}", text)
        for step, texts in sampled(list(run.having("text")), SAMPLES)
        for name, text in texts.items()
    ]
