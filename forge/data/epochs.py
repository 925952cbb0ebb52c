"""Which source a sample is of, and how often each source is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from forge.data.dataset import PackedDataset
from forge.data.order import numbered
from forge.data.synthetic import SyntheticSource

log = logging.getLogger(__name__)

# Up to here repeated text teaches nearly as much as new text, and soon after that little (arXiv 2305.16264).
MANY = 4.0


def epochs(dataset: PackedDataset, sample: int) -> dict[str, float]:
    """Return path of source -> how many epochs of it have been read before global sample `sample` of the dataset's order.

    A path that comes again is numbered. Synthetic sources have no epochs.
    """
    drawn = dict(zip(dataset.order.sources, dataset.order.drawn(sample), strict=True))
    files = {
        name: source for name, source in dataset.sources.items() if not isinstance(source, SyntheticSource)
    }
    paths = numbered(source.name for source in files.values())
    return {path: drawn[name] / dataset.windows[name] for path, name in zip(paths, files, strict=True)}


def sources_of(dataset: PackedDataset, samples: Sequence[int]) -> Tensor:
    """Return the source of each global sample of the dataset's order, by its place in `dataset.sources`: int64 `[n]`."""
    places = {name: place for place, name in enumerate(dataset.sources)}
    return torch.tensor([places[dataset.order.sources[dataset.order.locate(one)[0]]] for one in samples])


def log_epochs(before: dict[str, float], after: dict[str, float]) -> None:
    """Log how often each source has been read, and will have been by the end of the run (see `epochs`)."""
    for name, total in after.items():
        so_far = f", {before[name]:.2f} so far" if before[name] else ""
        log.info("%s: %.2f epochs by the end of the run%s", name, total, so_far)
    many = [f"{name} {total:.3g} times" for name, total in after.items() if total > MANY]
    if many:
        log.warning(
            "the run reads %s: beyond about %g epochs a model learns little more from the same text; add data, or lower "
            "its weight or train.steps",
            ", ".join(many),
            MANY,
        )
