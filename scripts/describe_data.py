"""Write a page about a dataset of prepare_data.py: size, document lengths, left-out documents, metadata, sample texts.

python scripts/describe_data.py data/python/train --tokenizer data/tokenizer --output data.html
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.format import TokenDataset
from forge.data.tokenizer import load_tokenizer
from forge.runtime.errors import UserError
from forge.runtime.files import replace_atomically
from forge.tools.prepare.statistics import page
from scripts.options import Options, count, exit_code_of, local_path


def main(arguments: list[str] | None = None) -> int:
    """Write the page and return the exit code."""
    parser = Options(description=__doc__)
    add = parser.add_argument
    add("dataset", type=Path, metavar="DIR", help="a folder with a dataset.json")
    add(
        "--output",
        type=local_path,
        default=Path("data.html"),
        metavar="FILE",
        help="the page to write (%(default)s)",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="the dataset's tokenizer; without a tokenizer, no documents are shown",
    )
    add("--samples", type=count, default=5, metavar="N", help="number of documents to show (%(default)s)")
    given = parser.parse_args(arguments)

    def work() -> None:
        tokenizer = load_tokenizer(given.tokenizer) if given.tokenizer else None
        if tokenizer is not None and TokenDataset(given.dataset).index.tokenizer != tokenizer.fingerprint:
            raise UserError(
                f"--tokenizer {given.tokenizer}: {given.dataset} was prepared with another tokenizer"
            )
        replace_atomically(given.output, page(given.dataset, tokenizer, given.samples).encode())
        print(f"wrote {given.output}")

    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
