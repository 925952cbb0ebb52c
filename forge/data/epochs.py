"""The number of epochs read of each source, and its limits."""

from __future__ import annotations

import logging

from forge.data.dataset import PackedDataset
from forge.data.order import numbered
from forge.data.synthetic import SyntheticSource
from forge.runtime.causes import Cause
from forge.runtime.errors import UserError

log = logging.getLogger(__name__)

# Up to this number of epochs, repeated text is nearly as useful as new text. With more epochs, repeated text is soon of
# little use (arXiv 2305.16264).
MANY = 4.0


def epochs(dataset: PackedDataset, sample: int) -> dict[str, float]:
    """Return source name -> number of epochs read before global sample `sample` of the dataset's order.

    If several sources have the same name, the later ones are called name#2, name#3, ... Synthetic sources have no epochs
    and are left out.
    """
    read = _epochs_by_source(dataset, sample)
    names = numbered(dataset.labels[source] for source in read)
    return dict(zip(names, read.values(), strict=True))


def _epochs_by_source(dataset: PackedDataset, sample: int) -> dict[str, float]:
    order = dataset.order
    drawn = dict(zip(order.sources, order.drawn(sample), strict=True))
    # Samples that a roll-back has skipped are not read.
    return {
        name: order.count_between(name, 0, drawn[name]) / dataset.windows[name]
        for name, source in dataset.sources.items()
        if not isinstance(source, SyntheticSource)
    }


def check_caps(dataset: PackedDataset, last: int) -> None:
    """Raise UserError if a source exceeds its limit of epochs in `dataset.most_epochs` before global sample `last`."""
    for name, total in _epochs_by_source(dataset, last).items():
        most = dataset.most_epochs.get(name, total)
        if total > most:
            raise UserError(
                f"data.sources: {dataset.labels[name]} would be read {total:.3g} times by the end of the run, more "
                f"than its max_epochs = {most:g}; lower its weight or train.steps, raise max_epochs, or set "
                'data.on_max_epochs = "leave_out"'
            )


def log_left_out(dataset: PackedDataset, position: int, last: int) -> None:
    """Log each global sample at which sources with max_epochs are left out, with the names of these sources.

    position: the next global sample of the run. Raises UserError if all sources reach max_epochs before sample `last`.
    """
    order = dataset.order
    limits = [dataset.caps.get(name) for name in order.sources]
    for segment in order.segments:
        if not position < segment.start <= last:
            continue
        out = [
            dataset.labels[name]
            for name, weight in zip(order.sources, segment.weights, strict=False)
            if not weight and dataset.weights.get(name)
        ]
        log.info(
            "from sample %d on, sources that have reached max_epochs are not read: %s",
            segment.start,
            ", ".join(out),
        )
    end = order.capped_at(max(position, order.segments[-1].start), limits)
    if end is not None and end < last:
        raise UserError(
            f"data.sources: every source reaches its max_epochs at sample {end}, but the run needs {last} samples; "
            "add data, raise max_epochs, or lower train.steps"
        )


def log_epochs(before: dict[str, float], after: dict[str, float]) -> None:
    """Log the epochs of each source so far and at the end of the run. before, after: from `epochs`."""
    for name, total in after.items():
        so_far = f", {before[name]:.2f} so far" if before[name] else ""
        log.info("%s: %.2f epochs by the end of the run%s", name, total, so_far)
    many = [f"{name} {total:.3g} times" for name, total in after.items() if total > MANY]
    if many:
        log.warning(
            "the run reads %s, but after about %g times a model learns little more from the same text; add data, or lower "
            "the weight of the source or train.steps",
            ", ".join(many),
            MANY,
            extra=Cause.NOTE.mark,
        )
