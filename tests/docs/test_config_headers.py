"""The commands in a shipped config's header, to prepare its data, plan and run it, are valid as written."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from forge.config import Config, check_world, load_config
from forge.config.load import CONFIGS, parse_command_line
from forge.runtime.errors import UserError
from forge.tools.plan.hardware import find_hardware
from scripts.options import Options
from scripts.slurm import job
from tests.support.pages import REPOSITORY

NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))
RECIPES = [name for name in NAMES if not name.startswith("sweeps/")]
TARGETS = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M)


class Parsed(Exception):
    """Raised to end a script after its options are parsed."""

    def __init__(self, given: argparse.Namespace):
        self.given = given


@pytest.fixture
def parse(monkeypatch):
    """Parse a script's command and return its options, without running it. SystemExit: wrong options."""
    original = Options.parse_args

    def stop(self, *arguments, **options):
        raise Parsed(original(self, *arguments, **options))

    monkeypatch.setattr(Options, "parse_args", stop)

    def parse(words: list[str]) -> argparse.Namespace:
        script = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))
        with pytest.raises(Parsed) as found:
            script.main(words[2:])
        return found.value.given

    return parse


def commands(text: str) -> list[list[str]]:
    """Return the indented lines of a header, split into words."""
    header = re.match(r"(#.*\n)+", text)
    return [shlex.split(line) for line in re.findall(r"^#     (.+)$", header[0] if header else "", re.M)]


def header_of(name: str) -> list[list[str]]:
    return commands((CONFIGS / name).read_text("utf-8"))


def run_of(words: list[str]) -> tuple[list[str], int] | None:
    """Return the arguments of train.py in a command, and its number of processes; None for another command."""
    if words[0] == "sbatch":
        options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
        script = next(place for place, word in enumerate(words) if word.endswith(".sbatch"))
        assert (REPOSITORY / words[script]).is_file(), words[script]
        return words[script + 1 :], int(options["--nodes"]) * int(options["--gpus-per-node"])
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        assert words[3] == "train.py"
        return words[4:], int(words[2])
    return (words[2:], 1) if words[:2] == ["python", "train.py"] else None


def load(arguments: list[str], world: int) -> Config:
    """Load the configuration of `arguments` for `world` processes; UserError for a wrong key or layout."""
    line = parse_command_line(arguments)
    config = load_config(arguments)
    check_world(config, line.world_size or world)
    if line.hardware:
        find_hardware(line.hardware)
    return config


def check(words: list[str], parse) -> None:
    """Fail unless a command's script exists, accepts these options, and has valid keys and a valid layout."""
    if run := run_of(words):
        load(*run)
    elif words[0] == "make":
        assert words[1] in TARGETS, words
    else:
        assert words[0] == "python" and (REPOSITORY / words[1]).is_file(), words
        parse(words)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_valid(name: str, parse) -> None:
    found = header_of(name)
    assert found, f"{name} has no command in its header"
    for words in found:
        check(words, parse)


@pytest.mark.parametrize("name", RECIPES)
def test_the_prepared_data_is_at_the_configs_path(name: str, parse) -> None:
    config, found = load_config(["--config", name]), header_of(name)
    sources = [source.path for source in config.data.sources] + [one.path for one in config.data.validation]
    if ["make", "data"] in found:
        assert config.data.tokenizer == "data/tokenizer" and config.model.vocab_size == 4096
        assert sources == ["data/python/train", "data/python/validation"]
        return
    (prepared,) = (parse(words) for words in found if words[1] == "scripts/prepare_data.py")
    assert prepared.holdout and sources == [f"{prepared.output}/train", f"{prepared.output}/validation"]
    assert prepared.tokenizer == config.data.tokenizer
    (first,) = (
        parse(words) for words in found if words[1] in ("scripts/train_tokenizer.py", "scripts/convert.py")
    )
    if "vocab_size" in first:
        assert str(first.output) == config.data.tokenizer and first.vocab_size == config.model.vocab_size
    else:
        assert config.data.tokenizer == f"{first.output}/tokenizer"


@pytest.mark.parametrize("name", RECIPES)
def test_the_run_command_has_the_headers_number_of_processes(name: str) -> None:
    """The header's first line names the number of processes, and its plan has the same number."""
    text = (CONFIGS / name).read_text("utf-8")
    named = re.search(r"^# For (\d+|one) (?:process|GPU)", text, re.M)
    assert named
    world = 1 if named[1] == "one" else int(named[1])
    runs = [run for words in header_of(name) if (run := run_of(words))]
    planned = [parse_command_line(arguments) for arguments, _ in runs]
    assert [line.world_size for line in planned if line.action == "plan"] in ([], [world])
    trained = [size for (_, size), line in zip(runs, planned, strict=True) if line.action == "run"]
    assert trained[0] == world
    assert all(line.config == name for line in planned)


def test_job_py_checks_a_headers_submission(monkeypatch) -> None:
    (arguments, world) = next(
        run for words in header_of("7b.toml") if (run := run_of(words)) and words[0] == "sbatch"
    )
    assert job.main(["check", str(world), *arguments]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "python scripts/nowhere.py",
        "python scripts/prepare_data.py --output data/web --holdout 0.001",
        "python scripts/train_tokenizer.py --vocab-sise 128256",
        "make dataa",
        "torchrun --nproc-per-node 8 train.py --config 1b.tml",
        "torchrun --nproc-per-node 8 train.py --config 1b.toml --train.stepps=3",
        "torchrun --nproc-per-node 7 train.py --config 1b.toml",
        "python train.py --config 1b.toml --plan --world-size 8 --hardware h1000",
        "sbatch --nodes=2 --gpus-per-node=8 scripts/slurm/trian.sbatch --config 1b.toml",
    ],
)
def test_a_wrong_command_would_be_found(line: str, parse) -> None:
    """The second line was once in the header of 1b.toml."""
    (words,) = commands(f"# For 8 processes.\n#     {line}\n\n[model]\n")
    with pytest.raises((AssertionError, SystemExit, UserError)):
        check(words, parse)


def test_all_paths_in_a_headers_prose_exist() -> None:
    for name in NAMES:
        text = re.match(r"(#.*\n)+", (CONFIGS / name).read_text("utf-8"))[0]
        for path in re.findall(r"\b(?:docs|scripts|configs)/[\w/.-]+\.\w+", text):
            assert Path(REPOSITORY / path).exists(), f"{name}: {path}"
