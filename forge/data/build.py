"""Open the data of a config and check it against model and tokenizer. Files of disabled features are not opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.config import Config
from forge.config.data import SourceConfig, Stream, used_sources
from forge.data.cache import BlockCache
from forge.data.dataset import PackedDataset, windows_of
from forge.data.format import TokenDataset
from forge.data.permutation import key_of
from forge.data.sources import SYNTHETIC, Source, count_windows, open_source
from forge.data.synthetic import SyntheticSource
from forge.data.tokenizer import Tokenizer, load_tokenizer
from forge.runtime.causes import Cause
from forge.runtime.distributed import find_difference, on_every_rank
from forge.runtime.errors import UserError, caused_by
from forge.runtime.files import is_url

NO_TOKENIZER = "none"


@dataclass(frozen=True)
class RunData:
    """The data of a run. fingerprints: identify the data; a resume compares them."""

    dataset: PackedDataset
    validation: dict[str, Source]
    tokenizer: Tokenizer | None
    fingerprints: dict[str, Any]


@caused_by(Cause.DATA)
def open_data(config: Config) -> RunData:
    """Open and check all data of a run. Collective: an error on any rank is raised on every rank."""
    # One cache for both. Two caches would take each other's blocks for those of another run, and evict them first.
    streams = [*_used(config), *(config.data.validation if config.evaluate.interval else ())]
    cache = on_every_rank("opening the cache", lambda: open_cache(config, streams))
    dataset = on_every_rank("opening the data", lambda: build_dataset(config, cache))
    validation = on_every_rank("opening the held-out data", lambda: build_validation(config, cache))
    tokenizer = on_every_rank("opening the tokenizer", lambda: build_tokenizer(config))
    fingerprints = input_fingerprints(dataset, tokenizer)
    if other := find_difference("comparing the data", fingerprints):
        raise UserError(
            f"rank {other.rank} reads other data than rank 0: the content of {other.key} differs; copy the same files to "
            "every node"
        )
    return RunData(dataset, validation, tokenizer, fingerprints)


def build_dataset(config: Config, cache: BlockCache | None = None) -> PackedDataset:
    """Open the training samples. cache: keeps blocks of remote sources; None: open the cache of the config.

    Raises UserError if a source is missing, damaged or too short, or was made with another tokenizer.
    """
    used = _used(config)
    sources = _open(config, used, "train", cache)
    leaves_out = config.data.on_max_epochs == "leave_out"
    dataset = PackedDataset(
        sources,
        _weights(config, sources, [source.weight for source in used]),
        config.train.seq_len,
        config.run.seed,
        config.data.mixture_block,
        config.data.document_mask,
        config.data.packing,
        [source.max_epochs if leaves_out else 0.0 for source in used],
    )
    named = dict(zip(dataset.labels, used, strict=True))
    dataset.labels.update({name: source.name for name, source in named.items() if source.name})
    if not leaves_out:
        dataset.most_epochs = {name: one.max_epochs for name, one in named.items() if one.max_epochs}
    return dataset


def _used(config: Config) -> list[SourceConfig]:
    return [config.data.sources[number] for number in used_sources(config)]


def _weights(config: Config, sources: Sequence[Source], weights: Sequence[float]) -> list[float]:
    """Return the sources' weights with `data.temperature` applied.

    With a temperature above 0, weights are rounded to six significant digits, to keep messages short. A synthetic source
    then raises UserError, because it has no size.
    """
    temperature = config.data.temperature
    if not temperature:
        return list(weights)
    if endless := [source.name for source in sources if isinstance(source, SyntheticSource)]:
        raise UserError(
            f"data.temperature = {temperature:g} needs the size of each source, but source {endless[0]} is synthetic and "
            "endless; set data.temperature = 0, or remove that source"
        )
    samples = [windows_of(source, config.train.seq_len, config.data.packing).count for source in sources]
    largest = max(samples)
    return [
        float(f"{weight * (count / largest) ** (1 / temperature):.6g}")
        for count, weight in zip(samples, weights, strict=True)
    ]


def build_validation(config: Config, cache: BlockCache | None = None) -> dict[str, Source]:
    """Return the held-out sources by name. Empty if `evaluate.interval` is 0. cache: as in `build_dataset`.

    Raises UserError if a source is missing, damaged or too short, or was made with another tokenizer.
    """
    if not config.evaluate.interval:
        return {}
    entries = config.data.validation
    sources = _open(config, entries, "validation", cache)
    for source in sources:
        count_windows(source, config.train.seq_len)
    return {entry.name: source for entry, source in zip(entries, sources, strict=True)}


def build_tokenizer(config: Config) -> Tokenizer | None:
    """Load the tokenizer of the data, for checkpoints and text samples.

    Returns None if all data is synthetic or `data.tokenizer` is "none". Raises UserError if the tokenizer's ids exceed
    model.vocab_size.
    """
    paths = [source.path for source in _used(config)]
    if all(path == SYNTHETIC for path in paths) or config.data.tokenizer == NO_TOKENIZER:
        return None
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"data.tokenizer {config.data.tokenizer}: has {tokenizer.vocab_size} ids, more than "
            f"model.vocab_size {config.model.vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def input_fingerprints(dataset: PackedDataset, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return key -> fingerprint (JSON) of the inputs that must not change at a resume.

    Equal fingerprints mean equal samples.
    """
    fingerprints: dict[str, Any] = {
        "data.tokenizer": tokenizer.fingerprint if tokenizer else None,
        "run.seed": dataset.order.seed,
        "train.seq_len": dataset.seq_len,
        "data.mixture_block": dataset.block,
    }
    for number, (name, windows) in enumerate(dataset.samples.items()):
        fingerprints[f"data.sources[{number}].path"] = windows.fingerprint
        fingerprints[f"data.sources[{number}].weight"] = float(dataset.weights[name])
        if name in dataset.caps:
            fingerprints[f"data.sources[{number}].max_epochs"] = dataset.caps[name]
    return fingerprints


def open_cache(config: Config, streams: Sequence[Stream]) -> BlockCache | None:
    """Open the cache folder for blocks of remote streams; None if no stream is remote."""
    if not any(is_url(stream.path) for stream in streams):
        return None
    data = config.data
    return BlockCache(Path(data.cache_dir) if data.cache_dir else None, data.cache_gib)


def _open(config: Config, streams: Sequence[Stream], purpose: str, cache: BlockCache | None) -> list[Source]:
    """Open the sources of `streams`. Synthetic sources are different samples of one Markov chain."""
    vocab_size = config.model.vocab_size
    sources = []
    cache = cache or open_cache(config, streams)
    for number, stream in enumerate(streams):
        seed = key_of(config.run.seed, purpose, number)
        source = open_source(
            stream.path, seed, vocab_size, dtype=stream.dtype, eos_id=stream.eos_id, cache=cache
        )
        sources.append(source)
    datasets = [source for source in sources if isinstance(source, TokenDataset)]
    if not datasets:
        return sources
    if config.data.tokenizer == NO_TOKENIZER:
        raise UserError(
            f"data.tokenizer: is none, but {datasets[0].path} was prepared with a tokenizer; set data.tokenizer to "
            "that tokenizer"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    for dataset in datasets:
        if dataset.index.tokenizer != tokenizer.fingerprint:
            raise UserError(
                f"{dataset.path}: was prepared with another tokenizer (fingerprint "
                f"{dataset.index.tokenizer[:12]}) than data.tokenizer {config.data.tokenizer} (fingerprint "
                f"{tokenizer.fingerprint[:12]}); set data.tokenizer to the dataset's tokenizer, or prepare the data again"
            )
    return sources
