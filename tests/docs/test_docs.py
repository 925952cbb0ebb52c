"""All keys, paths and commands of the documentation exist, and every command runs.

Commands run in a copy of a fresh clone with a little data. train.py and the scripts run in forked processes, to save the
interpreter start. Overrides appended to the command line shrink long runs. The documented part stays unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import load_config
from forge.config.keys import keys, read_toml, sections, to_literal
from forge.config.load import CONFIGS
from tests.support.harness import start_ranks
from tests.support.layouts import slow_unless
from tests.support.pages import PAGES, REPOSITORY, blocks, commands, links, quoted
from tests.support.runs import reserve_port
from tests.support.scripts import run_script

NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]
# Keys added by the recipes of docs/internals/extending.
EXAMPLES = ("optimizer.sgd", "optimizer.soap", "model.embedding_multiplier")
FILE_ENDINGS = ("py", "toml", "jsonl", "json", "md", "log", "sbatch", "txt", "sh")
# Folders of the repository. Commands create all other paths.
OURS = tuple(
    f"{name}/"
    for name in ("benchmarks", "configs", "docs", "forge", "scripts", "tests")
    if (REPOSITORY / name).is_dir()
)

pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("configuration.md", "faults.md")],
    ids=lambda page: page.name,
)
def test_a_page_has_at_most_2500_words(page: Path) -> None:
    assert len(page.read_text("utf-8").split()) <= 2_500


@pages
def test_every_key_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    named = set(re.findall(r"--([a-z_]+\.[a-z_.]+)[ =`]", text))
    for word in quoted(page):
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?: = .*)?", word)
        if match and match[1].split(".")[0] in sections() and not match[1].endswith(FILE_ENDINGS):
            named.add(match[1])
    named -= {"section.key"}
    missing = [name for name in named if name not in keys() and name not in sections()]
    assert sorted(name for name in missing if not name.startswith(EXAMPLES)) == []
    for word in quoted(page):
        match = re.fullmatch(r"\[([a-z_.]+)\]", word)
        assert not match or match[1] in (*sections(), *EXAMPLES), word


@pages
def test_every_toml_block_is_accepted(page: Path) -> None:
    """A complete configuration loads; a partial one is valid on top of the debug configuration."""
    for block in blocks(page):
        if block.language == "toml":
            table = read_toml(block.text)
            options = [
                f"--{section}.{key}={to_literal(value)}"
                for section, part in table.items()
                for key, value in part.items()
            ]
            load_config(["--config=debug", *options])


@pages
def test_every_path_exists(page: Path) -> None:
    missing = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            missing.append(target)
    for word in quoted(page):
        path = word.split()[0].rstrip("/") if word.split() else ""
        if path.startswith(OURS) and re.fullmatch(r"[\w./-]+", path) and not (REPOSITORY / path).exists():
            missing.append(word)
        if re.fullmatch(r"\w+\.py", path) and not any(REPOSITORY.glob(f"**/{path}")):
            missing.append(word)
    assert missing == []


# Pages that take four seconds or more, except the introduction and the main guides.
SLOW = (
    "CONTRIBUTING.md",
    *(
        f"docs/guides/{name}.md"
        for name in ("large-data", "planning", "recipes", "slurm", "verify", "watching")
    ),
    *(f"docs/reference/{name}.md" for name in ("models", "optimizers")),
)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=slow_unless(name not in SLOW))
        for page, name in zip(PAGES, NAMES, strict=True)
    ],
)
def test_every_command_runs(page: Path, clone: Path, tmp_path: Path) -> None:
    for command in commands(page):
        code, output = _run(command, clone, tmp_path)
        assert code == 0, f"{command}\nexit code {code}\n{output}"


def test_a_wrong_key_path_or_command_would_be_found(tmp_path, clone) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`train.stepps` in `forge/nowhere.py`\n\n```bash\npython train.py --config debg.toml\n```\n"
    )
    for check in (test_every_key_exists, test_every_path_exists):
        with pytest.raises(AssertionError):
            check(page)
    with pytest.raises(AssertionError, match="did you mean debug"):
        test_every_command_runs(page, clone, tmp_path)


# The sweep of docs/guides/recipes.md, smaller: fewer runs with fewer tokens, of the same two sizes.
SMALL_SWEEP = {
    '"train.global_batch_size" = 16': '"train.global_batch_size" = 2\n"train.seq_len" = 64\n"train.micro_batch_size" = 2\n'
    '"evaluate.sequences" = 2',
    '"train.tokens" = [': '"train.tokens" = [512, 1_024, 2_048]  # ',
    '"optimizer.lr" = [': '"optimizer.lr" = [4e-3]  # ',
}
# Runs the tasks of a job array one after the other.
SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
for task in $(seq 0 "$last"); do SLURM_ARRAY_JOB_ID=1 SLURM_ARRAY_TASK_ID=$task bash "$1" >> array.log 2>&1 || exit 1; done
"""


@pytest.mark.slow
def test_the_walk_from_a_sweep_to_a_law_runs(clone: Path, tmp_path: Path) -> None:
    """Run the commands of docs/guides/recipes.md marked `not run`. The sweep finds the job array's finished runs."""
    (clone / "configs").unlink()
    shutil.copytree(REPOSITORY / "configs", clone / "configs")
    sweep = clone / "configs" / "sweeps" / "ladder.toml"
    text = sweep.read_text()
    for old, new in SMALL_SWEEP.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    sweep.write_text(text)
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    typed = [
        one
        for block in blocks(REPOSITORY / "docs" / "guides" / "recipes.md")
        if block.reason and "corpus" not in block.reason  # its sweep takes an hour
        for one in block.commands()
    ]
    typed.sort(key=lambda command: "--slurm" not in command)
    assert len(typed) == 8
    for command in typed:
        code, output = (
            _run_in_shell(command, clone, tmp_path) if "&&" in command else _run(command, clone, tmp_path)
        )
        assert code == 0, f"{command}\nexit code {code}\n{output}"
    assert (clone / "array.log").exists()
    assert len(list((clone / "runs" / "ladder").glob("*/metrics.jsonl"))) == 6
    assert (clone / "law.html").stat().st_size > 10_000


def _run_in_shell(command: str, folder: Path, scratch: Path) -> tuple[int, str]:
    path = os.pathsep.join([str(scratch), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def clone(prepared: Path, tmp_path: Path) -> Path:
    """Return a separate copy for each page, because two pages may use one name for different things."""
    return Path(shutil.copytree(prepared, tmp_path / "clone", symlinks=True))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Return a copy of the repository with text, and with a small version of the output of `make train`."""
    folder = tmp_path_factory.mktemp("clone")
    for path in REPOSITORY.iterdir():
        if path.name not in ("data", "runs", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "my_text").mkdir()
    for number, file in enumerate(sorted((REPOSITORY / "forge").rglob("*.py"))):
        (folder / "my_text" / f"{number}.txt").write_text(file.read_text("utf-8"))
    for command in (
        "python scripts/train_tokenizer.py --input my_text --output data/tokenizer --vocab-size 1000",
        "python scripts/prepare_data.py --input my_text --tokenizer data/tokenizer --output data/python --holdout 0.2",
        "python train.py --config debug.toml --train.steps=300 --train.global_batch_size=2 --checkpoint.interval=100",
    ):
        code, output = _run(command, folder, folder)
        assert code == 0, f"{command}\n{output}"
    return folder


# Overrides that shrink any configuration. Keys in the command itself keep their values.
SMALL = {
    "model.dim": "32", "model.n_layers": "4", "model.n_heads": "4", "model.n_kv_heads": "2", "model.ffn_dim": "64",
    "model.vocab_size": "1000", "train.seq_len": "64", "train.global_batch_size": "4", "train.micro_batch_size": "1",
    "train.steps": "3", "evaluate.sequences": "2", "evaluate.sample_tokens": "2", "metrics.tensorboard": "false",
    "compile.enabled": "false",
}  # fmt: skip


def _run(command: str, folder: Path, scratch: Path) -> tuple[int, str]:
    """Run a command in `folder`; return exit code and output."""
    words = shlex.split(command, comments=True)
    if "--vocab-size" in words:  # the most pieces of a small text
        words[words.index("--vocab-size") + 1] = "1000"
    terminal = scratch / "terminal.txt"
    terminal.unlink(missing_ok=True)
    world = 1
    if words[0] == "torchrun":
        world = min(2, int(words[words.index("--nproc-per-node") + 1]))
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        words = ["python", *words[script:]]
    if words[0] == "python" and words[1].startswith(("train.py", "scripts/")):
        port, meeting = reserve_port() if world > 1 else (None, {})
        ranks = start_ranks(
            run_script, world, [*words[1:], *_small(words, folder)], folder, meeting, terminal
        )
        ranks.port = port
        codes = ranks.join()
        return max(codes, key=abs), terminal.read_text()
    if words[0] == "make":
        words.insert(1, "--dry-run")
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    }
    if words[0] == "sbatch":
        environment |= _cluster(scratch)
    done = subprocess.run(
        ["bash", "-c", shlex.join(words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 0 and words[0] == "sbatch" and "scripts/slurm/train.sbatch" in words:
        return _run(_alone(words), folder, scratch)
    return done.returncode, done.stdout + done.stderr


def _alone(words: list[str]) -> str:
    """Reduce a job's run to one process and a few steps."""
    given = words[words.index("scripts/slurm/train.sbatch") + 1 :]
    kept = [word for word in given if not word.startswith(("--parallel.", "--train.steps"))]
    return shlex.join(["python", "train.py", *kept, "--parallel.dp_replicate=1"])


def _small(words: list[str], folder: Path) -> list[str]:
    if words[1] == "scripts/prepare_data.py" and "--holdout" in words:  # enough for some held-out documents
        return ["--holdout", "0.2"]
    if words[1] != "train.py" or "--help" in words:
        return []
    values = {word.removeprefix("--").partition("=")[0]: word.partition("=")[2] for word in words}
    given = values.keys()
    options = SMALL | {"parallel.dp_shard": "-1"}
    config = words[words.index("--config") + 1]
    if "train.tokens" in given:
        options.pop("train.steps")
    if step := re.search(r"step-(\d+)$", values.get("checkpoint.resume", "")):
        # Under another name, because later commands use the run's later checkpoints.
        options |= {
            "train.steps": str(int(step[1]) + 3),
            "schedule.decay_fraction": "0",
            "run.name": "resumed",
        }
    if "--plan" in words:  # for the page's number of processes
        options.pop("train.global_batch_size")
    if not {"data.sources", "data.tokenizer"} & given and not _has_data(folder, config):
        options |= {"data.sources": '[{path = "synthetic"}]', "data.validation": "[]"}
    return [f"--{key}={value}" for key, value in options.items() if key not in given]


def _has_data(folder: Path, config: str) -> bool:
    """Return whether earlier commands have prepared a configuration's data; also True for a missing configuration."""
    path = folder / config if (folder / config).exists() else CONFIGS / Path(config).with_suffix(".toml")
    if not path.exists():
        return True
    sources = read_toml(path.read_text("utf-8")).get("data", {}).get("sources", [])
    return all((folder / source["path"]).exists() for source in sources)


def _cluster(scratch: Path) -> dict[str, str]:
    """Return the environment of a stub Slurm with empty steps. tests/slurm tests the script itself."""
    standins = REPOSITORY / "tests" / "slurm" / "bin"
    path = os.pathsep.join([str(standins), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "STANDIN": str(scratch), "STANDIN_STEP": "true"}


def _anchors(page: Path) -> set[str]:
    """Return a page's anchors, derived from headings like GitHub's."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
