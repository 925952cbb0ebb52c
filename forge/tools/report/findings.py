"""Find anomalies in the files of a run, by comparing layers, sources and ranks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from forge.tools.report.read import RunRecord

# A layer is an outlier if the value of one of its matrices exceeds this multiple of the matrix's median over all layers.
OUTLIER = 8.0
# At attention logits of this size, a softmax attends to a single key.
LARGE_LOGIT = 100.0
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def findings(runs: Sequence[RunRecord]) -> list[str]:
    """Return one sentence per anomaly, the most severe kinds first. With several runs, each sentence names its run."""
    found = []
    for run in runs:
        of = f"{run.name}: " if len(runs) > 1 else ""
        made = [
            _end(run),
            _diverged(run),
            *_layers(run),
            *_sources(run),
            *_slow(run),
            *_steps(run),
            *_inside(run),
            *_time(run),
        ]
        found += [of + sentence for sentence in made if sentence]
    return found


def _end(run: RunRecord) -> str:
    if run.status.get("state") == "failed":
        reason = str(run.status.get("reason")).rstrip(".")
        return f"The run has failed: {reason}. scripts/diagnose.py says more."
    return ""


def _diverged(run: RunRecord) -> str:
    losses = run.series("loss")[1]
    if len(losses) < 10:
        return ""
    # Medians of five consecutive losses, because one batch may be much easier than the next.
    smooth = [median(losses[at : at + 5]) for at in range(len(losses) - 4)]
    low, last = min(smooth), smooth[-1]
    if last > low + 0.5:
        return f"The loss is at {last:.3f} and was at {low:.3f} before: the run has diverged, or its data has changed."
    return ""


def _layers(run: RunRecord) -> list[str]:
    """Return a sentence for each layer whose updates, gradients or weights are far above the median over layers."""
    sentences = []
    kinds = {
        "updates": "updates, relative to the weights, are",
        "gradients": "gradients are",
        "weights": "weights are",
    }
    for group, words in kinds.items():
        lines = [one[group] for _, one in run.having("monitors") if group in one]
        if not lines:
            continue
        values: dict[str, dict[int, float]] = defaultdict(dict)
        for name in lines[-1]:
            numbers = [line[name] for line in lines if line.get(name) is not None]
            if numbers and (match := _LAYER.fullmatch(name)):
                values[match[2].removesuffix(".weight")][int(match[1])] = median(numbers)
        ratios: dict[int, dict[str, float]] = defaultdict(dict)
        for kind, layers in values.items():
            usual = median(layers.values())
            for layer, value in layers.items():
                if len(layers) >= 3 and usual > 0 and value > OUTLIER * usual:
                    ratios[layer][kind] = value / usual
        for layer, of_kind in sorted(ratios.items(), key=lambda item: -max(item[1].values())):
            kind, ratio = max(of_kind.items(), key=lambda item: item[1])
            more = f" and in {len(of_kind) - 1} more of its matrices" if len(of_kind) > 1 else ""
            sentences.append(
                f"Layer {layer}: its {words} {ratio:.0f} times those of the median layer in {kind}{more}."
            )
    return sentences


def _sources(run: RunRecord) -> list[str]:
    """Return a sentence for each source whose loss stays flat while another source's loss falls."""
    fallen: dict[str, tuple[float, float]] = {}
    for name in run.names("sources"):
        losses = run.series("sources", name)[1]
        if len(losses) >= 10:
            part = max(1, len(losses) // 10)
            fallen[name] = median(losses[:part]), median(losses[-part:])
    drops = {name: first - last for name, (first, last) in fallen.items()}
    best = max(drops.values(), default=0.0)
    if best < 0.1:
        return []
    return [
        f"Source {name}: its loss went from {fallen[name][0]:.3f} to {fallen[name][1]:.3f}, while that of another source "
        f"fell by {best:.3f}: {name} cannot be learnt (e.g. noise), or the model has already learnt it."
        for name, drop in drops.items()
        if drop < 0.1 * best
    ]


def _slow(run: RunRecord) -> list[str]:
    events = run.history_events_of("straggler")
    counts = Counter((event["rank"], event["phase"]) for event in events)
    sentences = []
    for (rank, phase), count in counts.most_common(3):
        worst = max(
            (event for event in events if (event["rank"], event["phase"]) == (rank, phase)),
            key=lambda event: event["seconds"],
        )
        times = f"{count} times" if count > 1 else "once"
        sentences.append(
            f"Rank {rank} is slow: reported {times}, its {phase} took up to {worst['seconds']:.3g} s where the median rank's "
            f"took {worst['median_s']:.3g} s. All ranks wait for it in every step."
        )
    return sentences


def _steps(run: RunRecord) -> list[str]:
    sentences = []
    if skipped := run.history_events_of("skipped"):
        steps = ", ".join(str(event["step"]) for event in skipped[:5])
        sentences.append(f"{len(skipped)} steps were skipped ({steps}{', ...' if len(skipped) > 5 else ''}).")
    if back := run.history_events_of("rolled_back"):
        sentences.append(f"The run rolled back {len(back)} times; the last time: {back[-1]['reason']}.")
    if spikes := run.history_events_of("spike"):
        sentences.append(
            f"{len(spikes)} spikes of loss or gradient norm; the last in step {spikes[-1]['step']}."
        )
    if damaged := run.history_events_of("fallback", "copies_differ"):
        sentences.append(f"{len(damaged)} checkpoints or copies were damaged: see the events.")
    if failed := run.history_events_of("save_failed"):
        sentences.append(f"{len(failed)} saves failed; the last: {failed[-1].get('error')}.")
    return sentences


def _inside(run: RunRecord) -> list[str]:
    sentences = []
    monitors = [one for _, one in run.having("monitors")]
    logits = {
        layer: one["max_logit"]
        for line in monitors[-3:]
        for layer, one in line.get("attention", {}).items()
        if one.get("max_logit") is not None and one["max_logit"] > LARGE_LOGIT
    }
    if logits:
        layer = max(logits, key=logits.__getitem__)
        sentences.append(
            f"Attention logits grow: up to {logits[layer]:.0f} in layer {layer}. QK-norm (model.qk_norm) bounds them."
        )
    dead = {
        layer: one["dead"]
        for line in monitors[-1:]
        for layer, one in line.get("units", {}).items()
        if one.get("dead") is not None and one["dead"] > 0.2
    }
    if dead:
        layer = max(dead, key=dead.__getitem__)
        sentences.append(f"In layer {layer} {dead[layer]:.0%} of the feed-forward units are dead.")
    routers = [of for _, of in run.having("routers")]
    idle = [layer for layer, one in (routers[-1] if routers else {}).items() if one.get("load_min") == 0.0]
    if idle:
        sentences.append(f"Experts without a token in the last reported step: in layers {', '.join(idle)}.")
    return sentences


def _time(run: RunRecord) -> list[str]:
    sentences = []
    waits = [
        line["data_time_s"] / line["step_time_s"]
        for line in run.lines
        if line.get("step_time_s") and line.get("data_time_s") is not None
    ]
    if len(waits) > 3 and median(waits[1:]) > 0.05:
        sentences.append(
            f"{median(waits[1:]):.0%} of a step is spent waiting for data: see data.prefetch and the disk."
        )
    goodput = run.events_of("goodput")
    if goodput and goodput[-1]["goodput"] < 0.5 and sum(goodput[-1]["seconds"].values()) > 600:
        seconds = goodput[-1]["seconds"]
        worst = max((kind for kind in seconds if kind != "steps"), key=seconds.__getitem__)
        sentences.append(
            f"Only {goodput[-1]['goodput']:.0%} of the time went into steps; the largest other part is {worst}."
        )
    return sentences
