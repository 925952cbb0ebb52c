"""Make a corpus of code and prose from pinned packages of PyPI and Debian, and check its SHA-256.

python scripts/make_corpus.py --size small --output data/corpus-small

pip and apt-get fetch the packages from their configured registries. The script installs no package, and runs no code of a
package. Exit codes: 0 the corpus has the hash in the manifest, or the manifest has no hash; 1 the hash differs, or a package
is missing or differs; 2 a wrong option or manifest. After an interruption the same command continues.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.runtime.cores import cores
from forge.tools.prepare.packages import make_corpus, read_manifest
from scripts.options import Options, exit_code_of, local_path, positive

MANIFEST = Path(__file__).resolve().parent / "corpus.toml"


def main(arguments: list[str] | None = None) -> int:
    """Make the corpus and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add(
        "--size",
        default="whole",
        metavar="SIZE",
        help="small (50 MB of text) or whole (480 MB) (%(default)s)",
    )
    add(
        "--output",
        required=True,
        type=local_path,
        metavar="DIR",
        help="folder to write the text, tokenizer and datasets to",
    )
    cache = "folder of fetched packages, each under its SHA-256 (%(default)s)"
    add("--cache", default=Path("data/packages"), type=local_path, metavar="DIR", help=cache)
    manifest = "packages, versions, hashes (the corpus.toml beside this script)"
    add("--manifest", default=MANIFEST, type=Path, metavar="FILE", help=manifest)
    add("--workers", type=positive, default=cores(), metavar="N", help="number of processes (%(default)s)")
    given = parser.parse_args(arguments)

    def work() -> None:
        manifest = read_manifest(given.manifest)
        make_corpus(manifest, given.size, given.cache, given.output, given.workers)

    return exit_code_of(work, "interrupted; the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
