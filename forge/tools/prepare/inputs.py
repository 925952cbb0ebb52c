"""The identity of a chunk's input: a stamp of its files (size, inode and times), and the SHA-256 of its documents.

A worker hashes documents while it tokenizes them, so the hash needs no second reading. Files with an unchanged stamp count
as unchanged, as in git. If the stamp has changed, a worker reads the documents again, without tokenizing, and compares the
hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable

from forge.data.tokenizer import Tokenizer
from forge.runtime.files import is_url
from forge.runtime.remote import version_of
from forge.tools.prepare.documents import Bad, Document, read_documents
from forge.tools.prepare.long_text import TextPart, read_part
from forge.tools.prepare.sample import Piece


def stamp_of(chunk: Iterable[Piece | TextPart]) -> str:
    """Return the stamp of a chunk: a hash of the size, inode and times of its files or, for URLs, of the version (ETag)."""
    digest = hashlib.sha256()
    for path in dict.fromkeys(piece.file.path for piece in chunk):
        if is_url(path):
            digest.update(f"{version_of(path)}\n".encode())
            continue
        try:
            status = os.stat(path)
        except OSError:
            digest.update(b"missing\n")
            continue
        # Unlike mtime, ctime cannot be set back by cp -p or touch -r.
        digest.update(
            f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
        )
    return digest.hexdigest()


class Content:
    """A SHA-256 over documents in order. It covers text and metadata, or the reason why a document is unreadable."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, document: str | Bad) -> None:
        if isinstance(document, Bad):
            self._add("bad", document.reason)
            return
        metadata = document.metadata if isinstance(document, Document) else {}
        self._add("text", document)
        if metadata:
            self._add("metadata", json.dumps(metadata, default=str))

    def _add(self, kind: str, text: str) -> None:
        content = text.encode("utf-8", "surrogatepass")
        self._digest.update(f"{kind} {len(content)}\n".encode())
        self._digest.update(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def content_of(
    chunk: Iterable[Piece | TextPart], tokenizer: Tokenizer, text_key: str, keys: tuple[str, ...]
) -> str:
    """Read the documents of a chunk and return their hash. tokenizer: decides where long texts are cut."""
    content = Content()
    for piece in chunk:
        for document in (
            read_part(piece, tokenizer)
            if isinstance(piece, TextPart)
            else read_documents(piece, text_key, keys)
        ):
            content.add(document)
    return content.hexdigest()
