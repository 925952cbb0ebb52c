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

REAL_DATA = Unused(
    "all data.sources are synthetic", lambda c: c.data.tokenizer != "none" and c.data.synthetic
)
URLS = Unused(
    "no source is a URL", lambda c: not any("://" in s.path for s in (*c.data.sources, *c.data.validation))
)
CAPS = Unused("no source has max_epochs", lambda c: not any(s.max_epochs for s in c.data.sources))
MIXTURE = Unused("there is one source", lambda c: sum(s.weight > 0 for s in c.data.sources) == 1)


class Stream(Section):
    """A stream of tokens."""

    path: Text
    """A folder written by scripts/prepare_data.py; a `.bin` file of raw token ids; a Megatron dataset (its `.idx`, or the
    common prefix of both files); or `synthetic`: generated, endless, learnable. All but the last may be URLs."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids in a `.bin` file; required for these files."""
    eos_id: Count | None = None
    """Token id that ends a document in a `.bin` file. Absent: the file is one document."""


class SourceConfig(Stream):
    """A stream of training tokens."""

    name: str = ""
    """Name of the source in logs, metrics and reports. Empty: its path."""
    weight: NonNegativeNumber = 1.0
    """Share of the samples, relative to the other sources. 0: none."""
    max_epochs: NonNegativeNumber = 0.0
    """Read the source at most this many times; see data.on_max_epochs. 0: no limit."""


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
    """A SentencePiece .model file, a Hugging Face tokenizer.json, a folder with one of them, `bytes` (one token per byte,
    no file), or `none`: train on token ids without a tokenizer, and show no text."""
    document_mask: bool = False
    """Do not attend across the documents of a sequence."""
    validation: Annotated[ListOf[ValidationConfig], unused_if("evaluate.interval", 0)] = ()
    """Held-out data, evaluated every evaluate.interval steps. []: none."""
    mixture_block: Annotated[int, Ge(1), Le(1_000_000), MIXTURE] = 1024
    """Every block of this many samples has the proportions of the sources exactly, rounded to samples. A block is held in
    memory."""
    prefetch: Positive = 2
    """Number of steps whose batches are read in advance."""
    temperature: Annotated[NonNegativeNumber, MIXTURE] = 0.0
    """Multiply each weight by the number of the source's samples to the power of 1 / temperature: 1: shares by size, above 1:
    between that and equal shares. 0: weights only."""
    on_max_epochs: Annotated[Literal["leave_out", "refuse"], CAPS] = "leave_out"
    """Reaction to a source that reaches max_epochs. leave_out: from then on the other sources share its part; refuse: do
    not start a run that would read it more often."""
    at_cap: Annotated[
        Literal["leave_out", "refuse"] | None, unused("its new name counts: data.on_max_epochs")
    ] = None
    """Former name of on_max_epochs. Counts if on_max_epochs is not set."""
    packing: Literal["stream", "best_fit", "document"] = "stream"
    """How documents become sequences. stream: all in a row, cut every train.seq_len tokens; best_fit: whole documents, as
    many as fit; document: one in each. The last two need a plan in each source, made by scripts/prepare_data.py --packing."""
    cache_dir: Annotated[str, URLS] = ""
    """Folder on each machine's own disk for parts of sources with URLs. It is private to the user (mode 0700), is shared by
    the user's runs, and may be deleted. Empty: forge-cache-UID in the system's folder for temporary files."""
    cache_gib: Annotated[PositiveNumber, URLS] = 16.0
    """Limit of cache_dir in GiB."""

    @model_validator(mode="before")
    @classmethod
    def _from_former_name(cls, values: Any) -> Any:
        """Read on_max_epochs from its former name."""
        if not isinstance(values, dict) or not values.get("at_cap") or "on_max_epochs" in values:
            return values
        return values | {"on_max_epochs": values["at_cap"]}

    @property
    def synthetic(self) -> bool:
        """Whether all sources with a weight other than 0 are synthetic."""
        return all(source.path == "synthetic" for source in self.sources if source.weight)
