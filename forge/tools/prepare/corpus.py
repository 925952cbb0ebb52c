"""Find text, JSON-lines and Parquet files, in the same order on every machine."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge.runtime.errors import UserError, lasting
from forge.runtime.files import is_url
from forge.runtime.remote import find_objects
from forge.tools.prepare.content import (
    COMPRESSED,
    File,
    may_hold_many,
    name_of,
    open_binary,
    open_content,
    plain_name,
    recognise,
)
from forge.tools.prepare.documents import Bad, reason_of
from forge.tools.prepare.sample import Piece, sample, whole

EXTENSIONS = (".txt", ".md", ".py", ".rst", ".jsonl", ".ndjson", ".json", ".parquet")
_SHOWN = 8  # extensions of skipped files named in a note


@dataclass(frozen=True)
class Corpus:
    """Files to read, as pieces. Pieces are in the order of the inputs and, within an input, of the paths.

    Without a limit of bytes, each piece is a whole file. With a limit, the pieces are a sample of all files.

    text_bytes: approximate size of the text in the pieces. found_bytes, found_files: size and number of all readable files,
    including files left out of the sample. duplicates: number of files dropped as copies. passed_over: extension -> number
    of skipped files in the input directories.
    """

    pieces: list[Piece]
    text_bytes: int = 0
    found_bytes: int = 0
    found_files: int = 0
    unreadable: list[Bad] = field(default_factory=list)
    duplicates: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)

    def notes(self) -> list[str]:
        """Return sentences for the user about files that were skipped or are read in part; [] without such files."""
        notes = []
        if self.passed_over:
            number = self.passed_over.total()
            notes.append(f"{number} {'file' if number == 1 else 'files'} skipped: {self._passed_over()}")
        if self.duplicates:
            notes.append(f"{self.duplicates} copies of other files left out")
        partly = sum(not piece.is_whole for piece in self.pieces)
        left_out = self.found_files - len(self.pieces)
        if partly or left_out:
            notes.append(
                f"a sample of {self.text_bytes / 1e6:.1f} of {self.found_bytes / 1e6:.1f} MB: of {self.found_files} files "
                f"{partly} are read in part and {left_out} left out (--max-bytes)"
            )
        return notes

    def _passed_over(self) -> str:
        common = self.passed_over.most_common()
        shown = [f"{count} {extension}" for extension, count in common[:_SHOWN]]
        rest = sum(count for _, count in common[_SHOWN:])
        return (
            ", ".join([*shown, *([f"{rest} others"] if rest else [])])
            + " (to read such files, use --extensions or name each file)"
        )


def find_corpus(
    inputs: Sequence[str | Path],
    extensions: Sequence[str] = EXTENSIONS,
    max_bytes: int | None = None,
    text_key: str = "text",
    option: str = "--input",
    without: Collection[Path] = (),
) -> Corpus:
    """Find all files below `inputs`, drop copies, and sample `max_bytes` of their text (see `sample`; None: take all).

    In a directory, files with one of the `extensions` count, compressed (.gz, .zst) or not. A .json file counts only if it
    has JSON lines. The search skips hidden directories, __pycache__, links to directories, and links to files outside of
    the directory. An input that is itself a file counts with any extension. If text files have equal content, or several
    paths lead to one file, only the first is kept. option: command-line option named in messages. without: files that are no
    input, such as those of the result.

    Raises UserError if an input is missing or unreadable, if no file is found, or if a package for reading a file is
    missing.
    """
    files, corpus = _list_files(inputs, extensions, text_key, option, without)
    kept = _drop_copies(files)
    found = taken = sum(file.size for file in kept)
    pieces = [whole(file) for file in kept]
    if max_bytes is not None:
        pieces, taken, found = sample(kept, max_bytes, text_key)
    corpus = replace(corpus, pieces=pieces, text_bytes=taken, found_bytes=found, found_files=len(kept))
    corpus = replace(corpus, duplicates=len(files) - len(kept))
    if not pieces:
        tried = f"; unreadable files: {len(corpus.unreadable)}" if corpus.unreadable else ""
        raise UserError(
            f"{option} {' '.join(map(str, inputs))}: no file with text ({', '.join(extensions)}){tried}"
            + "".join(f"; {note}" for note in corpus.notes())
        )
    return corpus


def _list_files(
    inputs: Sequence[str | Path],
    extensions: Sequence[str],
    text_key: str,
    option: str,
    without: Collection[Path],
) -> tuple[list[File], Corpus]:
    """Return the files to read, and a Corpus with only the unreadable and the skipped files filled in."""
    files: list[File] = []
    corpus = Corpus([])
    seen = {os.path.realpath(path) for path in without}
    endings = tuple(ending + suffix for ending in extensions for suffix in ("", *COMPRESSED))
    for given in inputs:
        if is_url(given):
            _list_objects(str(given), endings, text_key, files, corpus, seen)
            continue
        root = Path(given)
        if not root.exists():
            raise UserError(f"{option} {given}: no such file or directory")
        if not os.access(root, os.R_OK):
            raise UserError(f"{option} {given}: cannot be read (permission denied)")
        is_named, inside = root.is_file(), os.path.join(os.path.realpath(root), "")
        for path, key in [(str(root), root.name)] if is_named else _walk(root, corpus.unreadable):
            if not is_named and not key.endswith(endings):
                corpus.passed_over[_extension(key)] += 1
                continue
            real = os.path.realpath(path)
            if not is_named and not real.startswith(inside):
                corpus.passed_over["links out of the folder"] += 1
                continue
            if real in seen:
                continue
            seen.add(real)
            try:
                status = os.stat(real)
            except OSError as error:  # a dangling link
                corpus.unreadable.append(Bad(key, reason_of(error), many=may_hold_many(path)))
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if not status.st_size:
                _note_empty(key, corpus)
                continue
            _add(recognise(path, key, status.st_size, text_key), is_named, files, corpus)
    return files, corpus


def _note_empty(key: str, corpus: Corpus) -> None:
    """Count an empty file as unreadable if its format has no empty files: a copy was interrupted."""
    if key.endswith((".parquet", *COMPRESSED)):
        corpus.unreadable.append(Bad(key, "is empty", many=may_hold_many(key)))


def _add(file: File, is_named: bool, files: list[File], corpus: Corpus) -> None:
    if file.is_json and file.kind == "text":
        if not is_named:
            corpus.passed_over[f"{_extension(file.key)} without JSON lines"] += 1
            return
        _refuse_array(file)
    files.append(file)


def _list_objects(
    url: str, endings: tuple[str, ...], text_key: str, files: list[File], corpus: Corpus, seen: set[str]
) -> None:
    """Add the object at `url` to `files`. If `url` is a prefix, add the objects below it by the rules for directories.

    Also updates `corpus` and `seen`. Raises UserError if there is no object.
    """
    found = find_objects(url)
    if not found:
        raise UserError(f"--input {url}: no such object, and none below it")
    for path, size in found.items():
        is_named = path.rstrip("/") == url.rstrip("/")
        key = Path(name_of(lasting(path))).name if is_named else path.removeprefix(url.rstrip("/") + "/")
        if any(part.startswith(".") or part == "__pycache__" for part in key.split("/")[:-1]):
            continue
        if not is_named and not key.endswith(endings):
            corpus.passed_over[_extension(key)] += 1
        elif path not in seen:
            seen.add(path)
            if not size:
                _note_empty(key, corpus)
                continue
            _add(recognise(path, key, size, text_key), is_named, files, corpus)


def _extension(key: str) -> str:
    suffix = Path(plain_name(key)).suffix + key[len(plain_name(key)) :]
    return suffix.lower() or "without an extension"


def _refuse_array(file: File) -> None:
    """Raise UserError if a .json file is an array. Read as text, all documents of the array would become one document."""
    try:
        with open_content(file) as content:
            is_array = content.peek(1)[:1] == b"["
    except (OSError, EOFError):
        return  # read_documents reports the error
    if is_array:
        raise UserError(
            f"--input {file.path}: is a JSON array; convert the file to one object per line, e.g. with jq -c '.[]'"
        )


def _walk(root: Path, unreadable: list[Bad]) -> list[tuple[str, str]]:
    """Return (path, key) of the files below `root`, sorted by key. Add unreadable folders to `unreadable`."""

    def failed(error: OSError) -> None:
        unreadable.append(Bad(str(error.filename), reason_of(error), many=True))

    found = []
    for folder, folders, names in os.walk(root, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)
            found.append((path, Path(path).relative_to(root).as_posix()))
    return sorted(found, key=lambda path_and_key: path_and_key[1])


def _drop_copies(files: list[File]) -> list[File]:
    """Return `files` without text files that have the same content as an earlier file. Only files of equal size are read."""
    sizes = Counter(file.size for file in files if file.kind == "text")
    kept, seen = [], set()
    for file in files:
        if file.kind == "text" and sizes[file.size] > 1:
            try:
                with open_binary(file.path) as content:
                    digest = hashlib.file_digest(content, "sha256").digest()
            except OSError:
                digest = os.fsencode(file.path)  # keep the file: read_documents reports the error
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(file)
    return kept
