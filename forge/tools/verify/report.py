"""Render the results of a verification as text and as JSON."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from forge.config import Config
from forge.model import parameter_counts
from forge.parallel.build import build_meta_model
from forge.tools.verify.compare import Difference
from forge.tools.verify.explain import Finding
from forge.tools.verify.pieces import ranges
from forge.tools.verify.run import Outcome, Report

WORDS = {"equal": "equal", "different": "DIFFERS", "failed": "FAILED"}


def heading(name: str, small: Config, notes: list[str]) -> str:
    """Return a line about the verified configuration, and a line for each of the `notes` of `shrink`."""
    model = small.model
    experts = "" if model.moe is None else f", {model.moe.n_experts} experts"
    size = (
        f"{model.n_layers} layers of width {model.dim}, {model.n_heads} heads ({model.n_kv_heads} for keys and values)"
        f"{experts}, {parameter_counts(build_meta_model(small)).total:,} parameters"
    )
    return "\n".join(
        [
            f"{name}, shrunk to {size}; float64, synthetic data, constant learning rate",
            *(f"note: {note}" for note in notes),
        ]
    )


def outcome_line(outcome: Outcome) -> str:
    """Return the result of one layout in one line."""
    line = f"{outcome.case.name:<48} {WORDS[outcome.status]:<8}"
    if outcome.status == "failed":
        return f"{line} {last_line(outcome.error)}"
    line += f" {outcome.size:.1e} {outcome.seconds:5.1f} s"
    return line if outcome.finding is None else f"{line}  {outcome.finding.culprit}"


def summary(report: Report) -> str:
    """Return the end of the report: counts of layouts, tensors not compared, and the origin of the worst difference."""
    number = len(report.outcomes)
    numbers = [f"{number} layout{'' if number == 1 else 's'}"]
    for status in ("equal", "different", "failed"):
        number = sum(one.status == status for one in report.outcomes)
        numbers += [f"{number} {status}"] if number else []
    lines = [", ".join(numbers)]
    if report.not_reached:
        more = f"{report.not_reached} more layout{'' if report.not_reached == 1 else 's'}"
        lines.append(f"no time was left for {more}: increase --minutes")
    lines += [f"not allowed: {case.name}: {reason}" for case, reason in report.refused]
    unplaced = sorted({_general(name) for one in report.outcomes for name in one.unplaced})
    if unplaced:
        lines.append(
            "not compared, because shapes do not determine a rank's part, the values differ between two runs of one "
            "process, or only one checkout has the tensor: " + ", ".join(unplaced)
        )
    worst, smallest = report.worst, report.smallest
    if worst is not None and smallest is not None:
        lines += ["", *_explained(worst, smallest)]
    return "\n".join(lines)


def precision_table(report: Report, small: Config) -> str:
    """Return a table of each layout's relative differences from one process in float64, by kind of tensor.

    For one group of columns the layout computes in float64, for the other in the formats of the configuration.
    """
    kinds = ("loss", "output", "gradient", "parameter")
    own = f"{small.precision.compute}, sums in {small.precision.reduce}"
    width = 11 * len(kinds)
    lines = [
        f"{'':<48} {'float64':<{width}} {own}",
        f"{'':<48} " + "".join(f"{kind:<11}" for kind in 2 * kinds),
    ]
    for one in report.outcomes:
        numbers = [*map(one.largest.get, kinds), *map(one.rounded.get, kinds)]
        cells = "".join(f"{'-' if number is None else f'{number:.1e}':<11}" for number in numbers)
        lines.append(f"{one.case.name:<48} {cells}")
    return "\n".join(line.rstrip() for line in lines)


def _explained(worst: Outcome, smallest: Outcome) -> list[str]:
    shown = "shows the failure" if smallest.finding is None else "shows the difference"
    if smallest.case != worst.case:
        shown += f"; it is the smallest part of {worst.case.name} that does"
    if smallest.finding is None:
        return [f"{smallest.case.name} {shown}:", *smallest.error.rstrip().splitlines()[-25:]]
    finding = smallest.finding
    lines = [f"{finding.culprit}: {finding.why}", f"    {smallest.case.name} alone {shown}"]
    if finding.difference.kind in ("loaded", "continued"):
        lines.append(f"    the checkpoint was saved under {smallest.other.name}")
    lines.append(f"    {_numbers(finding.difference)}")
    if finding.others:
        names = sorted({_general(name) for name in finding.others})
        lines.append(f"    the same holds for {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    return lines


def _numbers(one: Difference) -> str:
    if one.rank < 0:
        return f"step {one.step}: some elements of the {one.kind} {one.name} are on no rank"
    place = f"[{', '.join(map(str, one.index))}]" if one.index else ""
    what = f"{one.kind} {one.name}{place}"
    if one.kind == "hooked":
        _, _, kind, name = one.name.split(" ")
        what = f"{kind} {name}{place} after the call"
    relative = f" (relative difference {one.size:.1e})" if isfinite(one.size) else ""
    where = f"rank {one.rank}, {what}"
    if one.part:
        dims = (" and ".join(f"{first}:{stop}" for first, stop in dim) for dim in ranges(one.part))
        where += f" (the rank has [{', '.join(dims)}])"
    if one.digest:
        copy = f" (the copy of rank {one.rank} differs)" if one.rank else ""
        where = f"digest of the {what}{copy}"
    # 12 digits, or 17 if the numbers look equal with 12.
    digits = 12 if f"{one.found:.12g}" != f"{one.expected:.12g}" else 17
    return f"step {one.step}, {where}: {one.found:.{digits}g} instead of {one.expected:.{digits}g}{relative}"


def last_line(error: str) -> str:
    """Return the last line of the first traceback in the text `error` of a RankFailed.

    Ranks without a traceback were waiting for the failed rank. If no rank has a traceback, return the last line of the
    first rank's message.
    """
    ranks = [text for text in re.split(r"^rank \d+: ", error, flags=re.M) if text.strip()]
    raised = [text for text in ranks if text.startswith("Traceback")] or ranks or ["no message"]
    return raised[0].rstrip().splitlines()[-1].strip()


def as_json(
    name: str, small: Config, notes: list[str], report: Report, *, complete: bool = True
) -> dict[str, Any]:
    """Return the whole report as one JSON object. complete: False if a requested layout was not compared."""
    return {
        "config": name,
        "equal": report.compared > 0 and not report.bad and complete,
        "compared": report.compared,
        "notes": notes,
        "shrunk": small.model.model_dump(),
        "parameters": parameter_counts(build_meta_model(small)).total,
        "layouts": [outcome_json(one) for one in report.outcomes],
        "not_allowed": [{"layout": case.name, "reason": reason} for case, reason in report.refused],
        "not_reached": report.not_reached,
        "not_found": report.not_found,
        "worst": None if report.worst is None else outcome_json(report.worst),
        "smallest": None if report.smallest is None else outcome_json(report.smallest),
    }


def outcome_json(one: Outcome) -> dict[str, Any]:
    """Return the result of one layout as a JSON object."""
    return {
        "layout": one.case.name,
        "processes": one.case.world,
        "equal": one.status == "equal",
        "status": one.status,
        "worst": _number(one.size),
        "where": None if one.finding is None else one.finding.culprit,
        "seconds": round(one.seconds, 2),
        "largest": {kind: _number(size) for kind, size in one.largest.items()},
        "rounded": {kind: _number(size) for kind, size in one.rounded.items()},
        "tensors": one.compared,
        "not_compared": list(one.unplaced),
        "loaded_from": one.other.name,
        "finding": None if one.finding is None else _finding(one.finding),
        "error": one.error,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    one = finding.difference
    numbers = {key: _number(getattr(one, key)) for key in ("found", "expected", "size")}
    place = {
        "step": one.step,
        "kind": one.kind,
        "tensor": one.name,
        "rank": one.rank,
        "index": list(one.index),
        "part": ranges(one.part),
        "digest": one.digest,
    }
    return {
        "culprit": finding.culprit,
        "why": finding.why,
        **place,
        **numbers,
        "others": list(finding.others),
    }


def _number(value: float) -> float | None:
    """Return `value`; None for a non-finite number, which JSON cannot represent."""
    return value if isfinite(value) else None


def _general(name: str) -> str:
    return re.sub(r"\blayers\.\d+\b", "layers.*", name)
