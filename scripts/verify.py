"""Check that a model, a configuration or a code change computes equal numbers under every layout.

    python scripts/verify.py --config debug
    python scripts/verify.py --config debug --model.kind=mine:Model --layouts "tp=2; tp=2 cp=2; dp_shard=2 pp=2"
    python scripts/verify.py --module mine:make_model --parallelize mine:parallelize --world-sizes 4

Shrinks the configuration. Runs a few steps in float64: first in one process, then on several local processes under every
axis of parallelism, every pair of axes and random layouts. Compares all results and names the first difference.
With --module, verifies another library's parallelism of a plain PyTorch module (docs/guides/verify-libraries.md).

Exit codes: 0 all layouts are equal, 1 a layout differs or fails, 2 bad input or no layout compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a clone, installed or not
sys.path.append(os.getcwd())  # for the user's own model
os.environ.setdefault("OMP_NUM_THREADS", "1")

from forge.config import Config, load_config
from forge.observe.json_lines import encode
from forge.observe.progress import format_duration
from forge.run.hooks import load_hooks
from forge.runtime.errors import FAILED, FINISHED, UserError
from forge.runtime.world import World
from forge.tools.verify.compare import TOLERANCE
from forge.tools.verify.in_place import verify_in_place, write_digests
from forge.tools.verify.layouts import Case, parse_layouts, require_any
from forge.tools.verify.library import LibraryRequest, library_json, notes_on, verify_library
from forge.tools.verify.ranks import RankFailed
from forge.tools.verify.record import Settings
from forge.tools.verify.report import as_json, heading, last_line, outcome_line, precision_table, summary
from forge.tools.verify.run import Outcome, Report, Verifier, verify, verify_against
from forge.tools.verify.shrink import rounded_config, shrink, steps_through
from scripts.options import Options, count, exit_code_of, exit_code_of_ranks, local_path, number, positive

bound = number(float, lambda value: value >= 0, "at least 0")
minutes = number(float, lambda value: value > 0, "more than 0")


def main(arguments: list[str] | None = None) -> int:
    """Compare layouts and return the exit code: FAILED if any differs."""
    parser = _parser()
    given, overrides = parser.parse_known_args(arguments)
    if given.module is not None or given.parallelize is not None:
        if overrides:
            parser.error(f"unrecognized arguments: {overrides[0]}")
        outcomes: list[Outcome] = []
        code = exit_code_of(lambda: outcomes.extend(_library(given)), "interrupted")
        bad = not outcomes or any(one.status != "equal" for one in outcomes)
        return FAILED if code == FINISHED and bad else code
    if given.config is None:
        parser.error("the following arguments are required: --config, or --module and --parallelize")
    if given.make_optimizer is not None:
        parser.error("--make-optimizer: only with --module")
    if given.in_place:
        return _in_place(given, overrides)
    if given.digests is not None:
        return exit_code_of(lambda: _write_digests(given, overrides), "interrupted")
    reports: list[Report] = []
    code = exit_code_of(lambda: reports.append(_run(given, overrides)), "interrupted")
    # Without a report, the reader has closed the pipe.
    return FAILED if code == FINISHED and (not reports or reports[0].bad) else code


def _library(given: argparse.Namespace) -> list[Outcome]:
    """Compare another library's parallelism of a plain module with one process, and print the results."""
    others = ("config", "layouts", "against", "in_place", "digests", "precision", "random", "bound")
    _refuse_with("--module", given, *others)
    if given.module is None or given.parallelize is None:
        raise UserError("--module and --parallelize belong together: give both, as package.module:function")
    _require_two_steps(given)
    request = LibraryRequest(given.module, given.parallelize, given.make_optimizer or "", given.steps or 3)
    progress = ProgressPrinter(quiet=given.json)
    if not given.json:
        print(f"{given.module}, parallelised by {given.parallelize}; float64", flush=True)
    outcomes = verify_library(request, given.world_sizes or [2], progress.end)
    worst = max((one for one in outcomes if one.status != "equal"), key=lambda one: one.size, default=None)
    if given.json:
        print(encode(library_json(request, outcomes)).decode(), end="", flush=True)
    else:
        notes = [f"note: {note}" for note in notes_on(outcomes)]
        print("\n".join([*notes, summary(Report(outcomes, worst=worst, smallest=worst))]), flush=True)
    return outcomes


def _run(given: argparse.Namespace, overrides: list[str]) -> Report:
    cases = None if given.layouts is None else parse_layouts(given.layouts)
    if given.bound is not None and given.against is None:
        raise UserError("--bound: only with --against or --in-place")
    if given.layouts is not None:
        _refuse_with("--layouts", given, "random", "world_sizes")
    config = load_config(["--config", given.config, *overrides])
    small, notes = shrink(config)
    settings = _settings(given, small)
    if given.against is None:
        _require_two_steps(given)
    if settings.steps < steps_through(small):
        notes.append(
            f"--steps {settings.steps} ends before the last phase, which needs {steps_through(small)}"
        )
    load_hooks(small)  # raises UserError for a path without a hook
    for world in given.world_sizes or ():
        require_any(small, world)
    if not given.json:
        print(heading(given.config, small, notes), flush=True)
    progress = ProgressPrinter(quiet=given.json)
    in_formats = rounded_config(config, small) if given.precision else None
    if given.against is not None:
        report = _against(given, small, cases or [Case()], settings, progress)
    else:
        report = _layouts(given, small, in_formats, cases, settings, progress)
    missing = report.missing(cases, given.world_sizes or (), given.random)
    if given.json:
        found = as_json(given.config, small, notes, report, complete=missing is None)
        print(encode(found).decode(), end="", flush=True)
    else:
        if in_formats is not None:
            print(f"\n{precision_table(report, in_formats)}\n")
        print(summary(report), flush=True)
    if missing is not None and not report.bad:
        some = "not every layout" if report.outcomes else "no layout"
        raise UserError(f"{some} was compared: {missing}")
    return report


def _refuse_with(option: str, given: argparse.Namespace, *others: str) -> None:
    """Raise UserError if any of the options `others` is given, as `option` does not use them."""
    values = {f"--{name.replace('_', '-')}": getattr(given, name) for name in others}
    if mixed := [other for other, value in values.items() if value is not None and value is not False]:
        raise UserError(f"{option} cannot be combined with {', '.join(mixed)}")


def _require_two_steps(given: argparse.Namespace) -> None:
    if given.steps == 1:
        raise UserError("--steps 1: needs 2 or more, one before and one after the checkpoint")


def _settings(given: argparse.Namespace, config: Config) -> Settings:
    return Settings(
        steps=given.steps or max(3 if given.digests is None else 10, steps_through(config)),
        lr=config.optimizer.lr,
        max_norm=config.train.grad_clip_norm,
        borders=True,
        uneven=True,
        held_out=True,
    )


def _in_place(given: argparse.Namespace, overrides: list[str]) -> int:
    """Verify the config's own layout on the launcher's processes. Return this process's exit code. Collective.

    Only rank 0 prints.
    """
    outcomes: list[Outcome] = []

    def work(world: World) -> None:
        _refuse_with("--in-place", given, "layouts", "against", "precision", "random", "world_sizes")
        _require_two_steps(given)
        config = load_config(["--config", given.config, *overrides])
        small, outcome = verify_in_place(
            config,
            _settings(given, shrink(config)[0]),
            world,
            given.digests,
            TOLERANCE if given.bound is None else given.bound,
        )
        outcomes.append(outcome)
        worst = None if outcome.status == "equal" else outcome
        report, notes = Report([outcome], worst=worst, smallest=worst), shrink(config)[1]
        if world.rank == 0 and given.json:
            print(encode(as_json(given.config, small, notes, report)).decode(), end="", flush=True)
        elif world.rank == 0:
            print(
                f"{heading(given.config, small, notes)}\n  {outcome_line(outcome)}\n{summary(report)}",
                flush=True,
            )

    code = exit_code_of_ranks(work, "interrupted")
    return FAILED if code == FINISHED and outcomes[0].status != "equal" else code


def _write_digests(given: argparse.Namespace, overrides: list[str]) -> None:
    """Run the steps in one process and write their digests to a file, for `--in-place --digests`."""
    if given.world_sizes is None or len(given.world_sizes) != 1:
        raise UserError(
            "--digests: needs --world-sizes N, the number of processes of the run that will read the file"
        )
    _refuse_with("--digests without --in-place", given, "layouts", "against", "precision", "random", "bound")
    _require_two_steps(given)
    config = load_config(["--config", given.config, *overrides])
    settings = _settings(given, shrink(config)[0])
    try:
        small = write_digests(config, settings, given.world_sizes[0], given.digests)
    except RankFailed as error:
        raise _failing("the run in one process", error) from None
    print(f"{heading(given.config, small, shrink(config)[1])}\n{given.digests}: written", flush=True)


def _layouts(
    given: argparse.Namespace,
    small: Config,
    rounded: Config | None,
    cases: list[Case] | None,
    settings: Settings,
    progress: ProgressPrinter,
) -> Report:
    """Compare layouts with one process. cases: None: every axis, every pair of axes, then random layouts."""
    began = time.monotonic()
    try:
        verifier = Verifier(small, settings, rounded=rounded)
    except RankFailed as error:
        raise _failing("the reference in one process", error) from None
    try:
        return verify(
            verifier,
            cases,
            worlds=[1, *(given.world_sizes or (2, 4))],
            random=given.random,
            seed=given.seed,
            seconds=60 * given.minutes - (time.monotonic() - began),
            begin=progress.begin,
            end=progress.end,
        )
    finally:
        verifier.close()
        progress.clear()


def _against(
    given: argparse.Namespace, small: Config, cases: list[Case], settings: Settings, progress: ProgressPrinter
) -> Report:
    """Compare this checkout with the checkout --against, layout by layout."""
    _refuse_with("--against", given, "precision", "random", "world_sizes")
    try:
        return verify_against(small, cases, settings, given.against, given.bound or 0.0, progress.end)
    except RankFailed as error:
        raise _failing("this checkout", error) from None


def _failing(name: str, error: RankFailed) -> UserError:
    """Print the traceback of a rank, and return an error with its last line."""
    print(str(error).rstrip(), file=sys.stderr)
    return UserError(f"{name} fails: {last_line(str(error))}")


class ProgressPrinter:
    """Progress: one line per finished layout. On a terminal, a last line shows the running layout."""

    def __init__(self, *, quiet: bool):
        self._quiet, self._shown = quiet, sys.stderr.isatty()
        self._done = 0

    def begin(self, case: Case, left_s: float) -> None:
        if self._shown:
            text = f"{self._done} done, {format_duration(left_s)} left, now {case.name}"
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def end(self, outcome: Outcome) -> None:
        self._done += 1
        self.clear()
        if not self._quiet:
            print(f"  {outcome_line(outcome)}", flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _worlds(text: str) -> list[int]:
    try:
        return [positive(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("must be numbers of processes, such as 2,4") from None


def _parser() -> Options:
    parser = Options(description=__doc__)
    parser.usage = (
        "%(prog)s --config FILE [--section.key=VALUE ...] [options]\n"
        "       %(prog)s --module PATH --parallelize PATH [options]"
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="a TOML file, or a name in configs/")
    add(
        "--module", metavar="PATH", help="function that makes a plain PyTorch module: package.module:function"
    )
    add(
        "--parallelize",
        metavar="PATH",
        help="--module: function that applies a library's parallelism to the module",
    )
    add(
        "--make-optimizer",
        metavar="PATH",
        help="--module: function that makes the optimizer from the parameters (torch.optim.AdamW)",
    )
    add("--layouts", metavar="TEXT", help='these layouts only, such as "tp=2 cp=2; ep=4 pp=2 context=ring"')
    add("--world-sizes", type=_worlds, metavar="2,4", help="numbers of processes (2,4)")
    add(
        "--random",
        type=count,
        metavar="N",
        help="number of random layouts after the systematic ones (as many as the time allows)",
    )
    add("--seed", type=count, default=0, metavar="N", help="seed of the random layouts (%(default)s)")
    add("--steps", type=positive, metavar="N", help="optimizer steps (3; with --digests 10)")
    add("--minutes", type=minutes, default=5.0, metavar="M", help="time limit in minutes (%(default)g)")
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="compare with another checkout of forge, not with one process",
    )
    add(
        "--bound",
        type=bound,
        metavar="X",
        help="allowed relative difference (--against: 0, bitwise equal; --in-place: 1e-9)",
    )
    add(
        "--in-place",
        action="store_true",
        help="under torchrun: verify the config's own layout on these processes",
    )
    add(
        "--digests",
        type=local_path,
        metavar="FILE",
        help="write digests of one process; with --in-place compare with them",
    )
    add(
        "--precision",
        action="store_true",
        help="also run in the config's own formats, and compare with float64",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
