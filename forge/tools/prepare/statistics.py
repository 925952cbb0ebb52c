"""Make a page about a dataset: its size, document lengths, left-out documents, packing, metadata and sample texts."""

from __future__ import annotations

import html
import json
from collections import Counter
from pathlib import Path

import numpy as np

from forge.data.format import START_DTYPE, TokenDataset
from forge.data.packing import plans_in
from forge.data.permutation import Permutation, key_of
from forge.data.tokenizer import Tokenizer
from forge.runtime.remote import join
from forge.tools.prepare.output import METADATA

_BAR, _LEFT, _WIDTH = 18, 90, 720  # pixels
_SHOWN = 12  # values shown per metadata key
_STYLE = (
    "body{font-family:sans-serif;max-width:960px;margin:2em auto;color:#333}td,th{padding:2px 12px 2px 0;text-align:left}"
    "pre{white-space:pre-wrap;background:#f5f5f5;padding:8px}"
)


def page(folder: Path, tokenizer: Tokenizer | None, samples: int = 5, excerpt: int = 300) -> str:
    """Return a page about the dataset in `folder` as HTML.

    tokenizer: decodes the first `excerpt` tokens of `samples` random documents; None: show no documents.
    """
    dataset = TokenDataset(folder)
    index = dataset.index
    lengths = document_lengths(dataset)
    quantiles = np.quantile(lengths, [0.05, 0.5, 0.95]).astype(int).tolist()
    rows = [
        ("documents", f"{index.documents:,}"),
        ("tokens", f"{index.tokens:,} as {index.dtype}"),
        ("shards", f"{len(index.shards):,}"),
        ("text", f"{index.text_bytes / 1e6:,.1f} MB, {index.text_bytes / index.tokens:.3f} bytes per token"),
        ("vocabulary", f"{index.vocab_size:,}; the greatest id is {index.max_token_id:,}"),
        (
            "tokens per document",
            f"mean {lengths.mean():,.0f}; 5 %, 50 %, 95 %: {', '.join(f'{q:,}' for q in quantiles)}",
        ),
        *(
            (f"left out: {why}", f"{count:,} documents")
            for why, count in index.origin.get("left_out", {}).items()
        ),
        *_plans(folder),
    ]
    parts = [
        f"<h1>{html.escape(str(folder))}</h1>",
        _table(rows),
        "<h2>Tokens per document</h2>",
        histogram(lengths),
    ]
    parts += _metadata(folder)
    if tokenizer is not None:
        parts.append("<h2>Documents</h2>")
        firsts = np.cumsum(lengths) - lengths
        order = Permutation(len(lengths), key_of("documents of a page"))
        for number in sorted(order(place) for place in range(min(samples, len(lengths)))):
            ids = dataset.read(int(firsts[number]), int(min(lengths[number], excerpt))).tolist()
            parts.append(f"<h3>document {number}, {lengths[number]:,} tokens</h3>")
            parts.append(f"<pre>{html.escape(tokenizer.decode(ids))}</pre>")
    body = "\n".join(parts)
    title = html.escape(str(folder))
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n{body}\n'


def document_lengths(dataset: TokenDataset) -> np.ndarray:
    """Return the number of tokens of each document, int64 `[documents]`. Reads only the document starts."""
    starts, first = [], 0
    for shard in dataset.index.shards:
        found = np.fromfile(join(dataset.path, shard.document_file.name), START_DTYPE)
        starts.append(found.astype(np.int64) + first)
        first += shard.tokens
    return np.diff(np.concatenate(starts), append=dataset.tokens)


def histogram(lengths: np.ndarray) -> str:
    """Return a histogram of document lengths, with bins by powers of two, as SVG."""
    exponents, counts = np.unique(np.log2(lengths).astype(int), return_counts=True)
    bars = []
    for place, (exponent, count) in enumerate(zip(exponents.tolist(), counts.tolist(), strict=True)):
        y, width = place * (_BAR + 4), (_WIDTH - _LEFT - 90) * count / counts.max()
        bars.append(f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">{2**exponent:,} to</text>')
        bars.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="#2563eb"/>')
        bars.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y + 13}">{count:,}</text>')
    height = len(exponents) * (_BAR + 4)
    return f'<svg width="{_WIDTH}" height="{height}" font-size="12">{"".join(bars)}</svg>'


def _plans(folder: Path) -> list[tuple[str, str]]:
    found = []
    for path, plan in plans_in(folder).items():
        if plan is None:
            found.append((path.name, "cannot be read"))
            continue
        counts = f"{plan.sequences:,} sequences, {plan.cut_documents:,} documents cut"
        padding = f"{plan.padded / (plan.tokens + plan.padded):.2%} padding"
        found.append((f"packing {plan.kind}, {plan.seq_len}", f"{counts}, {padding}"))
    return found


def _metadata(folder: Path) -> list[str]:
    """Return, for each metadata key, a heading and a table of its most frequent values, as HTML."""
    path = folder / METADATA
    counts: dict[str, Counter[str]] = {}
    if path.exists():
        with open(path, "rb") as lines:
            for line in lines:
                for key, value in json.loads(line).items():
                    counts.setdefault(key, Counter())[str(value)] += 1
    parts = []
    for key, values in sorted(counts.items()):
        shown = [(value, f"{count:,}") for value, count in values.most_common(_SHOWN)]
        more = [(f"{len(values) - _SHOWN:,} others", "")] if len(values) > _SHOWN else []
        parts += [f"<h2>{html.escape(key)}</h2>", _table([*shown, *more])]
    return parts


def _table(rows: list[tuple[str, str]]) -> str:
    lines = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(lines)}</table>"
