"""Leave out documents that a user's filter rejects, that share passages with given files, or that are duplicates.

All three rules are off by default.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge.runtime.errors import UserError
from forge.runtime.imports import load_function
from forge.runtime.terminal import printable
from forge.tools.prepare.corpus import find_corpus
from forge.tools.prepare.documents import Bad, read_documents

PERMUTATIONS, BANDS = 128, 16
"""MinHash signatures have 128 numbers in 16 bands of 8. Two documents are compared if they agree in a whole band. The
probability of this is 0.95 at a Jaccard similarity of 0.8, and 0.06 at 0.5."""
SIMILAR = 0.8
_SHINGLE = 5  # words
_WORD = re.compile(r"\w+")
Keep = Callable[[str, Mapping[str, Any]], str | None]


class FilterFailed(Exception):
    """The user's filter raised an exception."""


@dataclass(frozen=True)
class Quality:
    """Rules for leaving out documents, and the metadata to keep.

    filter: import path of a function of (text, metadata). The function returns None to keep a document, or a short
    reason to leave it out. decontaminate: files; a document sharing `ngram` consecutive words with one of them is left
    out. duplicates: leave out exact or near copies of earlier documents. metadata: keys of a JSON line or Parquet row,
    kept in metadata.jsonl.
    """

    filter: str = ""
    decontaminate: tuple[str, ...] = ()
    ngram: int = 13
    duplicates: Literal["none", "exact", "near"] = "none"
    metadata: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        return bool(self.filter or self.decontaminate or self.duplicates != "none" or self.metadata)

    def options(self) -> dict[str, Any] | None:
        """Return all fields as a JSON object; None if no rule is set."""
        if not self.is_on:
            return None
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    def reason(self, text: str, metadata: Mapping[str, Any], text_key: str) -> str | None:
        """Return the reason to leave out a document, according to filter and decontamination; None: keep the document.

        Duplicates are found later (`duplicates`). Raises FilterFailed if the filter raises.
        """
        if self.filter:
            keep = load_filter(self.filter)
            try:
                why = keep(text, metadata)
            except Exception as error:
                raise FilterFailed(f"{type(error).__name__}: {error}") from error
            if why is not None:
                return f"filter: {why}"
        if self.decontaminate:
            known = known_ngrams(self.decontaminate, self.ngram, text_key)
            if not known.isdisjoint(ngrams(text, self.ngram)):
                return "contaminated"
        return None


def filter_code(path: str) -> str:
    """Return the SHA-256 of the source files of the filter `path`, MODULE:FUNCTION.

    These are the file of MODULE and the file that defines the function. Modules imported by them are not hashed.
    """
    names = {path.partition(":")[0], getattr(load_filter(path), "__module__", None)}
    files = {getattr(sys.modules.get(name or ""), "__file__", None) for name in names}
    digest = hashlib.sha256()
    for file in sorted(filter(None, files)):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def decontaminate_content(quality: Quality, text_key: str) -> str:
    """Return the SHA-256 of the n-grams in the --decontaminate files. Raises UserError if a file cannot be read."""
    known = known_ngrams(quality.decontaminate, quality.ngram, text_key)
    return hashlib.sha256(np.array(sorted(known), np.uint64).tobytes()).hexdigest()


@lru_cache(maxsize=1)
def load_filter(path: str) -> Keep:
    """Import the user's filter function, MODULE:FUNCTION. Raises UserError if the import fails."""
    try:
        return load_function(path)
    except ValueError as error:
        raise UserError(
            f"--filter {path}: {error}; give MODULE:FUNCTION, the import path of a function of (text, metadata)"
        ) from error


@lru_cache(maxsize=1)
def known_ngrams(files: tuple[str, ...], n: int, text_key: str) -> frozenset[int]:
    """Return the hashes of all n-grams in the documents of `files`. A document of fewer than `n` words has none.

    Raises UserError if any file is unreadable or would be skipped, because a test set could otherwise be missed silently.
    Raises UserError if there is no n-gram at all.
    """
    found: set[int] = set()
    corpus = find_corpus(files, text_key=text_key, option="--decontaminate")
    for bad in corpus.unreadable:
        raise UserError(f"--decontaminate {printable(bad.where)}: {bad.reason}")
    if corpus.passed_over:
        raise UserError(
            f"--decontaminate {' '.join(files)}: files with {', '.join(corpus.passed_over)} would be skipped; name each "
            "of these files, or remove them"
        )
    for piece in corpus.pieces:
        for document in read_documents(piece, text_key):
            if isinstance(document, Bad):
                raise UserError(f"--decontaminate {printable(document.where)}: {document.reason}")
            found.update(ngrams(document, n))
    if not found:
        raise UserError(
            f"--decontaminate {' '.join(files)}: no document has --ngram {n} words, so nothing would be compared; lower "
            "--ngram"
        )
    return frozenset(found)


def ngrams(text: str, n: int) -> Iterator[int]:
    """Yield a 64-bit hash of each `n` consecutive words, in lower case and without punctuation."""
    words = _WORD.findall(text.lower())
    for first in range(len(words) - n + 1):
        yield _hash(" ".join(words[first : first + n]))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1)
def _coefficients() -> tuple[np.ndarray, np.ndarray]:
    """Return scale and shift of the hash functions, uint64 `[PERMUTATIONS]` each. They are the same for all signatures."""
    draws = np.random.default_rng(20240410).integers(0, 1 << 64, (2, PERMUTATIONS), dtype=np.uint64)
    return draws[0] | np.uint64(1), draws[1]


def signature(text: str) -> np.ndarray:
    """Return the MinHash signature of a text's sequences of five words (Broder, 1997), uint32 `[PERMUTATIONS]`.

    The expected fraction of equal numbers in two signatures is the Jaccard similarity of the two sets of sequences.
    """
    words = _WORD.findall(text.lower()) or [text]
    last = max(1, len(words) - _SHINGLE + 1)
    shingles = {_hash(" ".join(words[first : first + _SHINGLE])) for first in range(last)}
    values = np.fromiter(shingles, np.uint64, len(shingles))
    scale, shift = _coefficients()
    least = np.full(PERMUTATIONS, np.iinfo(np.uint64).max)
    for begin in range(0, len(values), 4096):
        # Multiply-shift hashing: the upper half of products modulo 2^64 (Dietzfelbinger et al., 1997).
        mixed = values[begin : begin + 4096, None] * scale + shift
        least = np.minimum(least, mixed.min(axis=0))
    return (least >> np.uint64(32)).astype(np.uint32)


def first_of_equal(digests: np.ndarray) -> np.ndarray:
    """Return, for each element of `digests`, the index of the first element equal to it, int64 `[n]`.

    digests: uint64 `[n]`.
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse]


def first_of_similar(signatures: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Group similar documents. Return, for each document, the index of the first member of its group, int64 `[n]`.

    signatures: uint32 `[n, PERMUTATIONS]`. candidates: indices of documents to group. Any other document is alone in its
    group.

    A band is one of BANDS equal parts of a signature. Two documents are similar if they agree in every number of a band
    and in at least the fraction SIMILAR of all numbers. Groups are the connected components of similar documents. Bands
    are compared one at a time, so memory is one number per document.
    """
    parent = np.arange(len(signatures))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = int(parent[place])
        return place

    rows = PERMUTATIONS // BANDS
    for band in range(BANDS):
        keys = np.zeros(len(candidates), np.uint64)
        for row in range(band * rows, (band + 1) * rows):
            keys = (
                keys * np.uint64(0x9E3779B97F4A7C15)
                + signatures[candidates, row].astype(np.uint64)
                + np.uint64(1)
            )
        firsts = first_of_equal(keys)
        for other in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
            one, two = int(candidates[firsts[other]]), int(candidates[other])
            a, b = root(one), root(two)
            if a != b and np.mean(signatures[one] == signatures[two]) >= SIMILAR:
                parent[max(a, b)] = min(a, b)
    return np.array([root(place) for place in range(len(parent))], np.int64)


def duplicates(digests: np.ndarray, signatures: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks, bool `[n]`: exact copies and near copies of an earlier document.

    digests: uint64 `[n]`. signatures: uint32 `[n, PERMUTATIONS]`; None: no document is a near copy.
    """
    first = first_of_equal(digests)
    exact = first != np.arange(len(digests))
    if signatures is None:
        return exact, np.zeros(len(digests), bool)
    places = first_of_similar(signatures, np.flatnonzero(~exact))
    return exact, (places != np.arange(len(digests))) & ~exact


def add_counts(counts: dict[str, int], more: Iterable[tuple[str, int]]) -> None:
    """Add the pairs (reason, count) in `more` to `counts`, in place. Pairs with count 0 are left out."""
    for reason, count in more:
        if count:
            counts[reason] = counts.get(reason, 0) + count
