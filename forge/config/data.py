"""[data]: the training and held-out data, and their reading order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import model_validator

from forge.config.section import (
    Count,
    ListOf,
    NonNegativeNumber,
    Positive,
    PositiveNumber,
    Section,
    Text,
    Unused,
    unused,
    unused_if,
)


def used_sources(config: Any) -> list[int]:
    """Return the indices of all data.sources with a weight above 0 in some phase. config: a `Config`."""
    weights = [
        tuple(source.weight for source in config.data.sources),
        *(phase.weights for phase in config.phase if phase.weights),
    ]
    return [number for number in range(len(weights[0])) if any(of_all[number] > 0 for of_all in weights)]


def is_synthetic(config: Any) -> bool:
    """Return whether all sources that the run uses are synthetic. config: a `Config`."""
    return all(config.data.sources[number].path == "synthetic" for number in used_sources(config))


REAL_DATA = Unused("all data.sources are synthetic", lambda c: c.data.tokenizer != "none" and is_synthetic(c))
URLS = Unused(
    "no source is a URL", lambda c: not any("://" in s.path for s in (*c.data.sources, *c.data.validation))
)
CAPS = Unused("no source has max_epochs", lambda c: not any(s.max_epochs for s in c.data.sources))
MIXTURE = Unused("there is one source", lambda c: len(used_sources(c)) == 1)


class Stream(Section):
    """A stream of tokens."""

    path: Text
    """A folder written by scripts/prepare_data.py; a `.bin` file of raw token ids; a Megatron dataset (its `.idx` file,
    or the common prefix of its two files); or `synthetic`: endless generated text with learnable patterns. All except
    `synthetic` may be URLs."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the token ids in a `.bin` file; required for `.bin` files."""
    eos_id: Count | None = None
    """Id of the end-of-document token in a `.bin` file. Absent: the file is one document."""


class SourceConfig(Stream):
    """A stream of training tokens."""

    name: str = ""
    """Name of the source in logs, metrics and reports. Empty: the source's path."""
    weight: NonNegativeNumber = 1.0
    """Share of the samples, relative to the other sources. 0: the source is not used."""
    max_epochs: NonNegativeNumber = 0.0
    """Maximum number of epochs over this source; see data.on_max_epochs. 0: no limit."""


class ValidationConfig(Stream):
    """A stream of held-out tokens."""

    name: Text
    """Name of the stream in logs and metrics."""


class Data(Section):
    """The training and held-out data."""

    sources: Annotated[ListOf[SourceConfig], MinLen(1)]
    """Training data: folders written by scripts/prepare_data.py, raw `.bin` files (which need dtype), Megatron `.idx`
    files, or `synthetic`. Weights need not sum to one."""
    tokenizer: Annotated[Text, REAL_DATA] = "bytes"
    """A SentencePiece .model file, a Hugging Face tokenizer.json, or a folder with one of these files. `bytes`: one
    token per byte, without a file. `none`: train on token ids without a tokenizer, and show no text."""
    document_mask: bool = False
    """Mask attention between different documents of a sequence."""
    validation: Annotated[ListOf[ValidationConfig], unused_if("evaluate.interval", 0)] = ()
    """Held-out data, evaluated every evaluate.interval steps. []: no evaluation."""
    mixture_block: Annotated[int, Ge(1), Le(1_000_000), MIXTURE] = 1024
    """Number of samples per mixture block. Within each block, the number of samples from each source matches the
    source's weight, up to rounding. One block is held in memory."""
    prefetch: Positive = 2
    """Number of batches to read ahead of training."""
    temperature: Annotated[NonNegativeNumber, MIXTURE] = 0.0
    """Multiply each source's weight by (number of its samples)^(1 / temperature). 1: shares proportional to size; above
    1: closer to equal shares. 0: use the weights alone."""
    on_max_epochs: Annotated[Literal["leave_out", "refuse"], CAPS] = "leave_out"
    """Handling of sources with max_epochs. leave_out: once a source reaches max_epochs, the other sources take over its
    share. refuse: report an error at the start if the run would exceed max_epochs."""
    at_cap: Annotated[Literal["leave_out", "refuse"] | None, unused("replaced by data.on_max_epochs")] = None
    """Former name of on_max_epochs. Used if on_max_epochs is not set."""
    packing: Literal["stream", "best_fit", "document"] = "stream"
    """How documents are packed into sequences. stream: concatenate all documents and cut every train.seq_len tokens.
    best_fit: fill each sequence with whole documents. document: one document per sequence. best_fit and document need a
    packing plan in each source, made by scripts/prepare_data.py --packing."""
    cache_dir: Annotated[str, URLS] = ""
    """Folder on each node's local disk for caching parts of URL sources. The folder is private to the user (mode 0700),
    shared by the user's runs, and may be deleted. Empty: forge-cache-UID in the system's temporary folder."""
    cache_gib: Annotated[PositiveNumber, URLS] = 16.0
    """Maximum size of cache_dir in GiB."""

    @model_validator(mode="before")
    @classmethod
    def _from_former_name(cls, values: Any) -> Any:
        """Set on_max_epochs from its former name, at_cap."""
        if not isinstance(values, dict) or not values.get("at_cap") or "on_max_epochs" in values:
            return values
        return values | {"on_max_epochs": values["at_cap"]}
