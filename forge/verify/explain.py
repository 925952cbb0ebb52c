"""The first place that differs, in the order of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.verify.compare import Comparison, Difference


@dataclass(frozen=True)
class Finding:
    """Where a difference arose. `culprit`: a module or parameter by name, or a phase of the step; `why`: what is known of
    it; `difference`: the numbers; `others`: more names with the same difference and no better claim."""

    culprit: str
    why: str
    difference: Difference
    others: tuple[str, ...] = ()


def explain(comparison: Comparison, order: Sequence[str]) -> Finding:
    """Return the first place that differs; there must be a difference. order: modules in the order of the computation."""
    first = min(one.step for one in comparison.differences)
    by_kind: dict[str, list[Difference]] = {}
    for one in comparison.differences:
        if one.step == first:
            by_kind.setdefault(one.kind, []).append(one)
    if found := by_kind.get("initial"):
        return _several(found, "the initial values differ, which must be the same bit for bit")
    if "output" in by_kind or "input" in by_kind:
        return _module(by_kind, order)
    if found := by_kind.get("loss"):
        return Finding("loss", "all activations up to the last norm agree, the loss does not", found[0])
    if found := by_kind.get("gradient"):
        return _gradient(found, order)
    if found := by_kind.get("norm"):
        return Finding("norm", "all gradients agree, but not their global norm", found[0])
    if found := by_kind.get("router"):
        return _several(found, "all gradients agree; the state of routers differs after the step")
    if found := by_kind.get("optimizer", []) + by_kind.get("parameter", []):
        return _several(found, "all gradients agree; the optimizer's update differs")
    if found := by_kind.get("saved"):
        return _several(found, "the layout's checkpoint does not hold what the model had")
    if found := by_kind.get("loaded"):
        return _several(found, "a checkpoint of one process is not loaded as it was saved")
    return _several(by_kind["resumed"], "a run that resumes does not continue as one that was not stopped")


def _module(by_kind: dict[str, list[Difference]], order: Sequence[str]) -> Finding:
    places = {name: number for number, name in enumerate(order)}
    outputs = {one.name: one for one in by_kind.get("output", ())}
    inputs = {one.name: one for one in by_kind.get("input", ())}
    for name in sorted(outputs, key=lambda name: places[name]):
        if name.partition("[")[0] not in inputs:
            return Finding(name, "its output differs while its input agrees", outputs[name])
    # The loss is a module without an output of its own.
    first = min(inputs, key=lambda name: places.get(name, len(places)))
    while (parent := first.rpartition(".")[0]) in inputs:
        first = parent
    return Finding(first, "its input differs, although everything computed before agrees", inputs[first])


def _gradient(found: list[Difference], order: Sequence[str]) -> Finding:
    """Backward runs from the end: the parameter that is used last is the first whose gradient differs."""
    places = {name: number for number, name in enumerate(order)}

    def place(one: Difference) -> int:
        module = one.name.rpartition(".")[0]
        while module and module not in places:
            module = module.rpartition(".")[0]
        return places.get(module, len(places))  # the head is called with the loss, after all other modules

    found = sorted(found, key=place, reverse=True)
    why = "its gradient differs while all activations and the loss agree; backward reaches it first"
    return Finding(found[0].name, why, found[0], tuple(one.name for one in found[1:]))


def _several(found: list[Difference], why: str) -> Finding:
    # Checkpoints have parameters under `model.`.
    first, *others = (one.name.removeprefix("model.") for one in found)
    return Finding(first, why, found[0], tuple(others))
