"""The chunks of a corpus: how it is cut, which chunks the existing parts belong to, and the identity of the whole.

Workers tokenize one chunk at a time (forge/tools/prepare/part.py). The cut depends only on sizes, so every machine makes the
same chunks.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.data.tokenizer import Tokenizer
from forge.runtime.errors import UserError, lasting
from forge.runtime.files import replace_atomically
from forge.tools.prepare.corpus import Corpus
from forge.tools.prepare.documents import Bad
from forge.tools.prepare.long_text import TextPart, check_text, text_parts
from forge.tools.prepare.part import Chunk, Tally, split_of
from forge.tools.prepare.sample import Piece

_VERSION = 4  # version of the rules for cutting a corpus into chunks


def cut_corpus(
    corpus: Corpus, tokenizer: Tokenizer, holdout: float, cut_texts: bool
) -> tuple[list[Chunk], Corpus]:
    """Cut the corpus into chunks of about 1/256 of its size, at least 1 MiB and at most 128 MiB.

    A cut inside a text file leaves the file's tokens unchanged. cut_texts: whether to cut text files. A compressed file is
    not cut, because it can be read only from its start. Opens the text files to cut, and leaves out the unreadable ones.
    Return the chunks, and the corpus with these files added to `unreadable`.
    """
    chunk_bytes = min(max(sum(piece.size for piece in corpus.pieces) // 256, 1 << 20), 128 << 20)
    chunks: list[Chunk] = [[]]
    room = chunk_bytes
    bad: list[Bad] = []
    for piece in corpus.pieces:
        parts: Iterable[Piece | TextPart] = [piece]
        if piece.file.kind != "text" or not piece.is_whole:
            parts = [piece] if piece.file.compression else piece.parts(chunk_bytes)
        elif piece.size > chunk_bytes and not piece.file.compression and tokenizer.can_cut and cut_texts:
            digest = check_text(piece.file)
            if isinstance(digest, Bad):
                bad.append(digest)
                continue
            parts = text_parts(piece.file, chunk_bytes, split_of(digest, holdout))
        for part in parts:
            if chunks[-1] and part.size > room:
                chunks.append([])
                room = chunk_bytes
            chunks[-1].append(part)
            room -= part.size
    return chunks, replace(corpus, unreadable=corpus.unreadable + bad)


def match_plan(parts: Path, options: dict[str, Any], chunks: list[Chunk], shared: bool = False) -> str:
    """Remove existing parts made with other options or chunks, and write this run's options and chunks to `parts`.

    Return the digest of options and chunks.
    shared: raise UserError instead of removing parts. This function does not detect changed documents: `encode_chunk`
    compares each part with the content of its chunk.
    """
    digest = hashlib.sha256()
    for number, (file, *places) in ((n, piece) for n, chunk in enumerate(chunks) for piece in chunk):
        same = file._replace(path=lasting(file.path))
        digest.update(os.fsencode(f"{number}\0{tuple(same)}\0{places}\n"))
    content = {"options": options, "chunks": digest.hexdigest(), "version": _VERSION}
    plan = json.dumps(content, sort_keys=True).encode()
    path, existing = parts / "plan.json", list(parts.glob("part-*.npz"))
    if path.exists() and path.read_bytes() == plan:
        if existing:
            print(f"continuing an interrupted run: {len(existing)} chunks are done", file=sys.stderr)
        return hashlib.sha256(plan).hexdigest()
    if existing and shared:
        raise UserError(
            f"{parts}: holds chunks of an unfinished run with other options or another input; finish that run with its own "
            "command, or remove the folder to discard its chunks"
        )
    if existing:
        print("the options or the input changed since a run was interrupted: starting over", file=sys.stderr)
    for part in existing:
        part.unlink()
    replace_atomically(path, plan)
    return hashlib.sha256(plan).hexdigest()


def identity_of(chunks: Iterable[Tally]) -> dict[str, Any]:
    """Return the identity of the whole input: hashes over the stamps and over the contents of its chunks, in order."""
    stamp, content = hashlib.sha256(), hashlib.sha256()
    for chunk in chunks:
        stamp.update(chunk.stamp.encode())
        content.update(chunk.content.encode())
    return {"version": _VERSION, "stamp": stamp.hexdigest(), "content": content.hexdigest()}
