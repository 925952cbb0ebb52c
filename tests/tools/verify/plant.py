"""Plant the defects, and write verify's report on each into docs/reference/verify-defects.md.

python -m tests.tools.verify.plant defects
python -m tests.tools.verify.plant combinations
"""

from __future__ import annotations

import functools
import re
import sys
import time

from forge.config import parse_toml_text
from forge.tools.verify.layouts import parse_layouts
from forge.tools.verify.record import Settings
from forge.tools.verify.run import Outcome, Verifier
from forge.tools.verify.shrink import shrink
from tests.support.pages import REPOSITORY
from tests.tools.verify import combinations, defects
from tests.tools.verify.defects import Defect

CONFIGS = defects.CONFIGS | combinations.CONFIGS
TABLES = {"defects": defects.DEFECTS, "combinations": combinations.COMBINATIONS}
PAGE = REPOSITORY / "docs" / "reference" / "verify-defects.md"


@functools.cache
def verifier(config: str) -> Verifier:
    """Compute the reference of a config once."""
    small, _ = shrink(parse_toml_text(CONFIGS[config]))
    return Verifier(small, Settings(lr=0.01, borders=True, uneven=True, held_out=True))


def outcome(defect: Defect) -> Outcome:
    """Run the layout with the defect on its ranks."""
    (case,) = parse_layouts(defect.layout)
    without = verifier(defect.config)
    if defect.origin:
        without = verifier.__wrapped__(defect.config)  # a fresh one, without earlier checks
        (origin,) = parse_layouts(defect.origin)
        without.check(origin)
        assert without.other == origin
    return without.patched(defect.patch).check(case)


def is_named(defect: Defect, found: Outcome) -> bool:
    """Return whether the outcome names the module or parameter of the defect."""
    if found.finding is None:
        return False
    right = re.fullmatch(defect.culprit, found.finding.culprit) is not None
    return right and found.finding.difference.kind == defect.kind


def main(name: str) -> None:
    """Write one table of the page; exit with 1 if a defect is missed."""
    rows, named, seconds = [], 0, []
    for defect in TABLES[name]:
        began = time.monotonic()
        found = outcome(defect)
        seconds.append(time.monotonic() - began)
        named += is_named(defect, found)
        says = (
            "-"
            if found.finding is None
            else f"`{_shown(found.finding.culprit)}`: {_shown(found.finding.why)}"
        )
        caught = "named" if is_named(defect, found) else found.status
        cells = [
            defect.text,
            *([defect.features] if defect.features else []),
            f"`{defect.layout}`",
            caught,
            says,
        ]
        rows.append(f"| {' | '.join(cells)} | {seconds[-1]:.0f} |")
        print(rows[-1], flush=True)
    columns = [
        "defect",
        *(["features"] if TABLES[name][0].features else []),
        "layout",
        "caught",
        "report",
        "s",
    ]
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    count = f"Caught and rightly named: {named} of {len(rows)}; {sorted(seconds)[len(seconds) // 2]:.0f} s in the median."
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = PAGE.read_text("utf-8").split(begin)
    after = rest.split(end)[1]
    PAGE.write_text("\n".join([before + begin + count, "", *head, *rows, end + after]), "utf-8")
    sys.exit(0 if named == len(rows) else 1)


def _shown(text: str) -> str:
    return text.replace(f"{defects.HERE}:", "mine:")


if __name__ == "__main__":
    main(*sys.argv[1:])
