"""Words that forge does not use: each has a plain term of the field, and a second reader should not have to guess.

    python -m tests.support.words             counts by file
    python -m tests.support.words FILE ...    every line of these files with such a word

Names count too: `was_told` holds "told". ALLOWED lists other meanings of these words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A word or phrase -> what to write instead.
INSTEAD = {
    "tell, tells, told, telling": "report, set, given, distinguish",
    "said, saying": "reported, printed, set; `Call before ...`",
    "alike": "identical, the same",
    "seam, seams": "extension point",
    "setback, setbacks": "rollback required",
    "lend, lends, lent, lending": "override, pass",
    "vain": "failed",
    "settle, settles, settled": "process the result, complete",
    "befall, befalls, befell, fate, kin, whence, thereof, anew, hither, whoever, whomever": "plain words",
    "mend, mends, mended": "fix, fixed",
    "last words": "crash report",
    "came to, come to, comes to, coming to": "result, amount to",
    "take in, takes in, took in": "process, read",
    "nothing means anything": "uninitialised storage",
    "give up gradients": "discard gradients",
    "open gradient, open gradients": "partial gradients",
    "materialise, materialised, materialises": "allocate",
    "judge, judges, judged, verdict, verdicts": "anomaly policy, decision",
}
# A regular expression per file (or "": everywhere) whose matches are not searched.
ALLOWED: dict[str, list[str]] = {"": [r"\.tell\(\)"]}
FOLDERS = ("forge", "scripts", "docs", "configs", "tests", "benchmarks")
PAGES = ("README.md", "CONTRIBUTING.md", "train.py")

_BANNED = re.compile(
    r"\b(" + "|".join(word.replace(" ", r"\s+") for key in INSTEAD for word in key.split(", ")) + r")\b",
    re.IGNORECASE,
)
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")


def files() -> list[Path]:
    found = [ROOT / page for page in PAGES]
    for folder in FOLDERS:
        found += [path for kind in ("*.py", "*.md", "*.toml") for path in (ROOT / folder).rglob(kind)]
    return sorted(path for path in found if path != Path(__file__))


def banned(path: Path) -> Iterator[tuple[int, str]]:
    """(line, word) of every banned word of a file; a phrase may be broken over two lines."""
    text = path.read_text()
    for pattern in ALLOWED[""] + ALLOWED.get(str(path.relative_to(ROOT)), []):
        text = re.sub(pattern, lambda match: re.sub(r"\w", "-", match[0]), text)
    text = _WORD_BREAK.sub(" ", text)
    for match in _BANNED.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()).lower()


def main(names: list[str]) -> None:
    if names:
        for name in names:
            path = Path(name).resolve()
            lines = path.read_text().splitlines()
            for number, word in banned(path):
                print(f"{name}:{number}: {word}: {lines[number - 1].strip()}")
        return
    counts = {path: [word for _, word in banned(path)] for path in files()}
    for path, words in sorted(counts.items(), key=lambda item: -len(item[1])):
        if words:
            each = ", ".join(f"{word} {words.count(word)}" for word in sorted(set(words)))
            print(f"{len(words):4} {path.relative_to(ROOT)}: {each}")
    print(f"{sum(map(len, counts.values())):4} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
