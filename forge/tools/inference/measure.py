"""Measure the loss, perplexity and bits per byte of a model in one process, on any token data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log

import numpy as np
import torch

from forge.data.dataset import read_window
from forge.data.format import TokenDataset
from forge.data.loader import stack_windows
from forge.data.order import merge
from forge.data.sources import Source, held_out_windows
from forge.data.tokenizer import Tokenizer
from forge.model import IGNORE
from forge.runtime.errors import FAILED, UserError
from forge.tools.inference.open import TrainedModel

# Largest number of tokens per read, and per call of the decoder.
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Measured:
    """The loss of a model on token data.

    loss: mean cross-entropy in nats over `tokens` labels, including the special tokens of documents. sequences: number of
    windows read. text_bytes: size of the labels' text in bytes of UTF-8, without special tokens; None if unknown.
    bytes_from: source of text_bytes: "dataset.json" (counted by prepare_data) or "decoding" (of the labels).
    """

    loss: float
    tokens: int
    sequences: int
    text_bytes: int | None
    bytes_from: str | None

    @property
    def perplexity(self) -> float:
        return exp(self.loss) if self.loss < 700.0 else inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss of all labels in bits, divided by the bytes of their text; None if unknown. Comparable between tokenizers."""
        return self.loss * self.tokens / log(2.0) / self.text_bytes if self.text_bytes else None


def measure(
    opened: TrainedModel,
    source: Source,
    sequences: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Measured:
    """Measure the loss of a model on windows of train.seq_len tokens of `source`.

    sequences: number of windows, chosen as in the evaluation of a run; None: all windows, including a shorter last one.
    Each token is predicted at most once, from the earlier tokens of its window. progress: called with the number of tokens
    read so far.

    Raises UserError if the source has fewer than two tokens, or (exit 1) if the loss is not finite.
    """
    seq_len = opened.config.train.seq_len
    whole, labelled = (source.tokens - 1) // seq_len, source.tokens - 1
    if labelled < 1:
        raise UserError(f"{source.name}: has {source.tokens} tokens, but a loss needs at least 2")
    if sequences is None or not whole:
        windows: Sequence[int] = range(-(-labelled // seq_len))
    else:
        windows = held_out_windows(whole, sequences)
    total, labels = 0.0, 0
    mask = opened.config.data.document_mask
    for first in range(0, len(windows), batch_size):
        rows = windows[first : first + batch_size]
        read_rows = (read_window(source, row, seq_len, mask) for row in rows)
        batch = stack_windows(read_rows, len(rows), seq_len, mask, first)
        with torch.no_grad():
            on_device = batch.to(opened.device)
            sums = opened.model(on_device.tokens, on_device.labels, None, on_device.documents)
        total += float(sums[1])
        labels += int((batch.labels != IGNORE).sum())
        progress(min((batch.first_sample + len(batch.tokens)) * seq_len, source.tokens))
    if not labels:
        raise UserError(
            f"{source.name}: has no label in the measured text, e.g. because each document has one token"
        )
    loss = total / labels
    if not isfinite(loss):
        raise UserError(
            f"{opened.path}: its loss on {source.name} is {loss}, which is not finite; try an older checkpoint",
            FAILED,
        )
    return Measured(loss, labels, len(windows), *_text_bytes(opened, source, windows))


def _text_bytes(
    opened: TrainedModel, source: Source, windows: Sequence[int]
) -> tuple[int | None, str | None]:
    """Return `Measured.text_bytes` and `Measured.bytes_from` for the labels of `windows`."""
    tokenizer, seq_len = opened.tokenizer, opened.config.train.seq_len
    # dataset.json counts the text of all tokens. Without a begin token, a document's first token has text, but may not be a
    # label. The labels must then be decoded.
    ends_are_special = tokenizer is None or tokenizer.bos_id is not None
    everything = len(windows) * seq_len >= source.tokens - 1
    if isinstance(source, TokenDataset) and everything and ends_are_special:
        return source.index.text_bytes, "dataset.json"
    if tokenizer is None:
        return None, None
    masked, total = opened.config.data.document_mask, 0
    for first, end in merge(
        (window, window + 1) for window in windows
    ):  # decode neighbouring windows together, because each cut may change the bytes of a token
        total += _decoded_bytes(
            source, tokenizer, first * seq_len, min(end * seq_len, source.tokens - 1), masked
        )
    return total, "decoding"


def _decoded_bytes(source: Source, tokenizer: Tokenizer, first: int, last: int, masked: bool) -> int:
    """Decode tokens first + 1 to last, document by document. Return the size of the text in bytes of UTF-8.

    masked: leave out the first token of each document, which is not a label under data.document_mask. If tokens `first` and
    first + 1 are in one document, decode both together and subtract the bytes of token `first`, because tokenizers drop a
    space at the start of a text.
    """
    total = 0
    document: list[int] = []
    begins_inside = not source.document_ids(first, 2)[1]
    if begins_inside:
        document = source.read(first, 1).tolist()
        total -= len(tokenizer.decode(document).encode())
    for begin in range(first, last, _AT_ONCE):
        count = min(_AT_ONCE + 1, last + 1 - begin)
        ids, owners = source.read(begin, count)[1:], source.document_ids(begin, count)
        parts = np.split(ids, np.flatnonzero(np.diff(owners)))
        for number, part in enumerate(parts):
            if number or len(document) >= _AT_ONCE:
                total += len(tokenizer.decode(document).encode())
                document = []
            document += part[1 if masked and number else 0 :].tolist()
    return total + len(tokenizer.decode(document).encode())
