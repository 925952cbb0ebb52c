"""Explain a comparison: find the first difference in computation order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.tools.verify.borders import call_of, module_of, parent_of
from forge.tools.verify.compare import Comparison, Difference


@dataclass(frozen=True)
class Finding:
    """The likely origin of the differences.

    culprit: a module, a parameter or a phase of the step. why: the reason for this choice, as a sentence. difference: the
    Difference at the culprit. others: names of equally likely origins.
    """

    culprit: str
    why: str
    difference: Difference
    others: tuple[str, ...] = ()


# Kinds of the tensors from forwards without gradients, which run after a step.
FORWARDS = ("held-out", "generation")
# Hook methods called before the forward of their step.
EARLY = ("before_run", "before_step", "before_data", "after_data", "before_gradients")


def explain(comparison: Comparison, order: Sequence[str], other: str = "one process") -> Finding:
    """Return the likely origin of the differences in `comparison`, which must have at least one.

    order: modules in computation order. other: name of the layout whose checkpoint was loaded, for `Finding.why`.
    """
    # A forward without gradients also differs e.g. after a missing update, but the next training step locates it better.
    training = [one for one in comparison.differences if one.kind not in FORWARDS] or comparison.differences
    first = min(one.step for one in training)
    by_kind: dict[str, list[Difference]] = {}
    for one in training:
        if one.step == first:
            by_kind.setdefault(one.kind, []).append(one)
    if found := by_kind.get("initial"):
        return _several(found, "the initial values differ; they must be bitwise equal")
    hooked = _hooks(by_kind.get("hooked", []))
    if hooked is not None and hooked.culprit.rpartition(".")[2] in EARLY:
        return hooked
    if "output" in by_kind or "input" in by_kind:
        return _module(by_kind, order)
    if found := by_kind.get("loss"):
        return Finding("loss", "all activations up to the last norm agree, but the loss does not", found[0])
    if found := by_kind.get("gradient"):
        return _gradient(found, order)
    if found := by_kind.get("norm"):
        return Finding("norm", "all gradients agree, but not their global norm", found[0])
    if hooked is not None:
        return hooked
    if found := by_kind.get("router"):
        return _several(found, "all gradients agree; the state of routers differs after the step")
    if found := by_kind.get("optimizer", []) + by_kind.get("parameter", []):
        return _several(found, "all gradients agree; the optimizer's update differs")
    if found := by_kind.get("held-out"):
        why = "training agrees; the loss on held-out text after the step does not"
        return Finding("held-out loss", why, found[0])
    if found := by_kind.get("generation"):
        why = "training agrees; the logits of text generation differ"
        return Finding("generation", why, found[0])
    if found := by_kind.get("saved"):
        return _several(found, "the layout's checkpoint differs from the model's state")
    if found := by_kind.get("curve"):
        return _curve(found)
    if found := by_kind.get("loaded"):
        return _several(found, f"the loaded checkpoint of {other} differs from the saved one")
    if found := by_kind.get("resumed"):
        return _several(found, "the resumed run differs from the uninterrupted run")
    if found := by_kind.get("continued"):
        return _several(
            found, f"after a checkpoint of {other} is loaded, the next step differs from that of one process"
        )
    return _several(by_kind["hooked"], "the input of the hook differs, although everything else agrees")


def _hooks(found: list[Difference]) -> Finding | None:
    """Return a Finding on the first hook call with equal inputs and different results; None if there is no such call.

    found: differences of kind `hooked`, with names `CALL before|after KIND PARAMETER`.
    """
    calls: dict[str, dict[str, list[Difference]]] = {}
    for one in found:
        call, when, _ = one.name.split(" ", 2)
        calls.setdefault(call, {}).setdefault(when, []).append(one)
    for call, of in calls.items():
        if "before" not in of:
            first, *others = of["after"]
            kind, name = first.name.split(" ")[2:]
            why = f"this hook changes the {kind} of {name} differently than in one process, although its inputs are the same"
            return Finding(call, why, first, tuple(one.name.split(" ")[3] for one in others))
    return None


def _curve(found: list[Difference]) -> Finding:
    call, curve = found[0].name.split(" ", 1)
    why = f"the number {curve} that this hook reports differs, although all parameters and gradients agree"
    return Finding(call, why, found[0], tuple(one.name for one in found[1:]))


def _module(by_kind: dict[str, list[Difference]], order: Sequence[str]) -> Finding:
    """Return a Finding on a module whose output differs while its input agrees.

    Begin with the module of the first difference in computation order. If its input differs, search the modules around
    it, from the inside out. If none qualifies, return the outermost module with a different input.
    """
    places = {name: number for number, name in enumerate(order)}
    outputs = {one.name: one for one in by_kind.get("output", ())}
    inputs = {one.name: one for one in by_kind.get("input", ())}
    # The loss is a module without an output of its own.
    first = min([*outputs, *inputs], key=lambda name: places.get(name, len(places)))
    why = "its output differs while its input agrees"
    if call_of(first) not in inputs:
        return Finding(first, why, outputs[first])
    around = first = call_of(first)
    while around := parent_of(around):
        if around in inputs:
            first = around
        elif around in outputs:
            return Finding(around, why, outputs[around])
    return Finding(first, "its input differs, although everything computed before agrees", inputs[first])


def _gradient(found: list[Difference], order: Sequence[str]) -> Finding:
    """Return a Finding on the differing gradient that backward computes first.

    Backward runs from the end of the model, so this is the gradient of the parameter that forward uses last.
    """
    # For a module with several calls, the last call counts.
    places = {module_of(name): number for number, name in enumerate(order)}

    def place(one: Difference) -> int:
        module = one.name.rpartition(".")[0]
        while module and module not in places:
            module = module.rpartition(".")[0]
        return places.get(module, len(places))  # the head is called with the loss, after all other modules

    found = sorted(found, key=place, reverse=True)
    why = "its gradient differs while all activations and the loss agree; backward reaches it first"
    return Finding(found[0].name, why, found[0], tuple(one.name for one in found[1:]))


def _several(found: list[Difference], why: str) -> Finding:
    # In checkpoints, names of parameters begin with `model.`.
    first, *others = (one.name.removeprefix("model.") for one in found)
    return Finding(first, why, found[0], tuple(others))
