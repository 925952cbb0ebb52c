"""Run a page of docs/internals/extending as a test: apply its diffs to a copy of the repository, train, compare layouts.

In the copy, `python -m tests.support.extension PAGE` trains the page's example in one process and on two ranks under
several layouts, in float64. If the page has a test function, the command runs it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.pages import REPOSITORY, Block, blocks
from tests.support.runs import Run

LAYOUTS = ("--parallel.data_parallel=zero1", "--parallel.tp=2", "--parallel.pp=2")
FLOAT64 = [f"--precision.{key}=float64" for key in ("storage", "compute", "reduce")]
SMALL = [*FLOAT64, "--train.steps=3", "--schedule.name=constant", "--train.micro_batch_size=1"]


def copy_repository(target: Path) -> None:
    """Make `target` a repository with its own forge/. Its bytecode is copied, so unchanged files need no compilation."""
    target.mkdir()
    for path in REPOSITORY.iterdir():
        if path.name not in ("forge", "data", "runs", "build", ".git"):
            (target / path.name).symlink_to(path)
    shutil.copytree(REPOSITORY / "forge", target / "forge")


def apply_page(page: Path, target: Path) -> list[Path]:
    """Apply the diffs of `page` to the repository at `target`; return the changed files. AssertionError: a diff fails."""
    changed = [
        path for block in blocks(page) if block.language == "diff" for path in _apply(block.text, target)
    ]
    text = page.read_text("utf-8")
    for name, content in re.findall(
        r"[Ss]ave\s+(?:this|it)\s+as\s+\*\*(\S+)\*\*.*?```python\n(.*?)```", text, re.S
    ):
        (target / name).write_text(content)
        changed.append(target / name)
    return changed


def _apply(diff: str, target: Path) -> list[Path]:
    changed = []
    for part in re.split(r"^--- a/", diff, flags=re.M)[1:]:
        name, _, hunks = part.partition("\n")
        path = target / name
        source = path.read_text()
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.M)[1:]:
            lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
            old = "\n".join(text for mark, text in lines if mark in " -")
            new = "\n".join(text for mark, text in lines if mark in " +")
            assert source.count(old) == 1, f"{name} has {source.count(old)} places like\n{old}"
            source = source.replace(old, new)
        path.write_text(source)
        changed.append(path)
    return changed


def train_command(page: Path) -> list[str]:
    """Return the options of the page's first train.py command."""
    for block in blocks(page):
        for command in Block("bash", block.text, None).commands():
            if "train.py --config" in command:
                return shlex.split(command.partition("train.py ")[2])
    raise AssertionError(f"{page} has no command that trains")


def main(page: Path) -> None:
    """Train the example of `page` under the layout of the page, or under all of LAYOUTS. AssertionError: they differ."""
    for block in blocks(page):
        if block.language == "python" and "np.save" in block.text:
            exec(block.text, {})
    options = [option for option in train_command(page) if not option.startswith(("--config", "debug"))]
    own = {option.partition("=")[0] for option in options}
    parallel = [option for option in options if option.startswith("--parallel.")]
    plain = [option for option in options if option not in parallel]
    layouts = [parallel] if parallel else [[one] for one in LAYOUTS if one.partition("=")[0] not in own]
    with TemporaryDirectory() as folder:
        one = Run(Path(folder) / "one", *SMALL, *plain)
        assert one() == 0, one.output()
        for number, layout in enumerate(layouts):
            two = Run(Path(folder) / f"layout-{number}", *SMALL, *plain, *layout)
            assert two(world=2) == 0, two.output()
            for ours, theirs in zip(one.metrics(), two.metrics(), strict=True):
                for field in ("loss", "grad_norm"):
                    difference = abs(ours[field] - theirs[field])
                    assert difference < 1e-9, (
                        f"{layout}, step {ours['step']}: {field} differs by {difference:.1e}"
                    )
    for block in blocks(page):
        if block.language == "python" and "def test_" in block.text:
            scope: dict = {}
            exec(block.text, scope)
            for name, function in scope.items():
                if name.startswith("test_"):
                    function()
    print(f"{1 + len(layouts)} layouts agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
