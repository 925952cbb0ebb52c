"""Compare every byte of a dataset of prepare_data.py with its checksums.

python scripts/verify_data.py data/python/train

Exit codes: 0 intact; 1 a file is damaged or missing; 2 nothing was checked: the folder has no dataset with checksums.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not

from forge.data.integrity import check_files
from forge.runtime.errors import FAILED, UserError
from scripts.options import Options, exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Compare the files with their checksums. Return the exit code: FAILED if a file is damaged."""
    parser = Options(description=__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="a folder with a dataset.json")
    given = parser.parse_args(arguments)

    def work() -> None:
        files = size = damaged = 0
        for check in check_files(given.dataset):
            files, size = files + 1, size + check.bytes
            if check.problem:
                damaged += 1
                print(f"{check.path}: {check.problem}", flush=True)
        if damaged:
            raise UserError(
                f"{given.dataset}: {damaged} of {files} files are damaged; restore them, or prepare the dataset again",
                FAILED,
            )
        print(f"{given.dataset}: intact: {files} files, {size / 1e9:.3g} GB")

    return exit_code_of(work, "interrupted: not everything was checked")


if __name__ == "__main__":
    sys.exit(main())
