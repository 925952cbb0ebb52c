"""Prove a refactoring numerically neutral: train with two checkouts of forge and compare the results bit for bit.

    python -m tests.refactoring.table against REVISION          the working tree against a commit
    python -m tests.refactoring.table record --output FILE      record the results of a checkout ...
    python -m tests.refactoring.table compare FILE              ... and compare other checkouts with the record

`--quick`: a few of the runs (under a minute). `--only NAME ...`: runs whose name contains one of these texts.
`--checkout DIR`: another checkout instead of this file's. The exit code is 0 if everything is equal, else 1.

For every run of `runs.py` the table compares:

- exit codes;
- each line of metrics.jsonl, without clock-dependent fields;
- skipped and rolled-back steps, and the limits behind these decisions;
- every tensor of the last checkpoint by name, dtype, shape and content, and the training state saved with it;
- the field names of status.json and events.jsonl.

Some runs are stopped halfway and continued. The compared checkout also continues the recorded checkout's run directories
from that point and must reach the same end: older checkpoints resume.

The table uses only a checkout's command line and run directory, so it can compare any two checkouts. Bitwise equality
needs the same machine and the same PyTorch, so no record is committed: record your base commit. FILE.d, beside FILE, holds
the run directories of a record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.refactoring.runs import CONFIG, RUNS

HERE = Path(__file__).resolve()
# Variables of launchers and of tests; the runs set their own.
FOREIGN = ("FORGE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PYTEST_")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refactoring.table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    record_it = commands.add_parser("record", help="train with a checkout and write the results to a file")
    record_it.add_argument("--output", type=Path, required=True, metavar="FILE")
    compare_it = commands.add_parser("compare", help="train with a checkout and compare with a record")
    compare_it.add_argument("record", type=Path, metavar="FILE")
    against_it = commands.add_parser("against", help="compare with a commit of this repository")
    against_it.add_argument("revision", metavar="REVISION")
    for command in (record_it, compare_it, against_it):
        command.add_argument("--checkout", type=Path, default=HERE.parents[2], metavar="DIR")
        command.add_argument("--only", nargs="+", default=(), metavar="NAME")
        command.add_argument("--quick", action="store_true")
        command.add_argument(
            "--cores", type=int, default=2, help="concurrent ranks; results do not depend on it"
        )
    chosen = parser.parse_args(argv)
    checkout, cores = chosen.checkout.resolve(), chosen.cores
    if chosen.command == "record":
        return record(checkout, chosen.output.resolve(), select(RUNS, chosen), cores)
    if chosen.command == "compare":
        return compare(checkout, chosen.record.resolve(), chosen, cores)
    with tempfile.TemporaryDirectory(prefix="forge-refactoring-") as folder:
        old, file = Path(folder) / "checkout", Path(folder) / "record.json"
        git = ["git", "-C", str(HERE.parents[2]), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), chosen.revision], check=True)
        try:
            failed = record(old, file, select(RUNS, chosen), cores)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
        return failed or compare(checkout, file, chosen, cores)


def select(runs: dict[str, Any], chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the runs selected on the command line, as plain dictionaries."""
    plain = {name: run if isinstance(run, dict) else asdict(run) for name, run in runs.items()}
    selected = {
        name: run
        for name, run in plain.items()
        if (run["quick"] or not chosen.quick)
        and (not chosen.only or any(text in name for text in chosen.only))
    }
    if not selected:
        raise SystemExit(f"no run is selected; there are: {'; '.join(plain)}")
    return selected


def record(checkout: Path, output: Path, runs: dict[str, dict[str, Any]], cores: int) -> int:
    """Execute `runs` with `checkout`, and write their descriptions and results to `output`."""
    kept = kept_folder(output)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    jobs = [job(name, run, keep=kept / slug(name) if run["old"] else None) for name, run in runs.items()]
    results = execute(checkout, jobs, cores)
    problems = {name: unexpected(runs[name], result) for name, result in results.items()}
    document = {"versions": versions(), "runs": runs, "results": results}
    for result in results.values():
        result.pop("terminal", None)
    output.write_text(json.dumps(document, indent=1) + "\n")
    return report(problems, results, "recorded")


def compare(checkout: Path, file: Path, chosen: argparse.Namespace, cores: int) -> int:
    """Execute the runs of `file` with `checkout`, and compare their results with the recorded ones."""
    recorded = json.loads(file.read_text())
    if recorded["versions"] != versions():
        raise SystemExit(f"recorded with {recorded['versions']}, but this is {versions()}: record again here")
    runs = select(recorded["runs"], chosen)
    jobs = [job(name, run) for name, run in runs.items()]
    expected = {name: recorded["results"][name] for name in runs}
    for name, run in runs.items():
        if run["old"]:
            continued = f"{name}, from the recorded checkpoint"
            rest = run | {"phases": run["phases"][1:]}
            jobs.append(job(continued, rest, start=kept_folder(file) / slug(name)))
            codes = expected[name]["codes"][1:]
            expected[continued] = expected[name] | {"codes": codes}
    results = execute(checkout, jobs, cores)
    problems = {name: first_difference(expected[name], result) for name, result in results.items()}
    return report(problems, results, "equal")


def first_difference(recorded: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return the first differing field of a run's results, with both values; None if the results are equal.

    Values are equal if their JSON is: a NaN equals a NaN, 0.0 is not -0.0, and 1 is not 1.0.
    """
    if "failure" in now or recorded["codes"] != now["codes"]:
        codes = f"exit codes {recorded['codes']} -> {now.get('codes')}"
        return f"{codes}\n{now.get('failure') or now['terminal']}"
    for old, new in zip(recorded["metrics"], now["metrics"], strict=False):
        if found := in_mapping(old, new):
            return f"metrics.jsonl, step {old.get('step')}: {found}"
    if len(recorded["metrics"]) != len(now["metrics"]):
        return f"metrics.jsonl has {len(recorded['metrics'])} -> {len(now['metrics'])} lines"
    for old, new in zip(recorded["decisions"], now["decisions"], strict=False):
        if found := in_mapping(old, new):
            return f"events.jsonl, {old['event']}: {found}"
    if len(recorded["decisions"]) != len(now["decisions"]):
        kinds = [[event["event"] for event in result["decisions"]] for result in (recorded, now)]
        return f"events.jsonl: {', '.join(kinds[0])} -> {', '.join(kinds[1])}"
    if recorded["checkpoint"] != now["checkpoint"]:
        return f"last checkpoint {recorded['checkpoint']} -> {now['checkpoint']}"
    if found := in_mapping(recorded["tensors"], now["tensors"]):
        return f"{recorded['checkpoint']}, tensor {found}"
    if spelled(recorded["state"]) != spelled(now["state"]):
        return f"{recorded['checkpoint']}, trainer.json, {in_mapping(recorded['state'], now['state'])}"
    if found := in_mapping(recorded["fields"], now["fields"]):
        return f"fields of {found}"
    return None


def in_mapping(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Return the first missing, new or changed key, in the order of `old`; None if the mappings are equal."""
    for key in dict.fromkeys([*old, *new]):
        if key not in new or key not in old:
            return f"{key} is {'missing' if key not in new else 'new'}"
        if spelled(old[key]) != spelled(new[key]):
            if isinstance(old[key], dict) and isinstance(new[key], dict):
                return f"{key}.{in_mapping(old[key], new[key])}"
            return f"{key}: {spelled(old[key])} -> {spelled(new[key])}"
    return None


def spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def unexpected(run: dict[str, Any], result: dict[str, Any]) -> str | None:
    """Return how a run's end differs from the expected one, in which case the result is useless; else None."""
    codes = [[phase["code"]] * phase["world"] for phase in run["phases"]]
    if "failure" in result or result["codes"] != codes:
        return f"exit codes {result.get('codes')}, expected {codes}\n{result.get('failure') or result['terminal']}"
    missing = [kind for kind in run["events"] if kind not in result["fields"]]
    if missing:
        return f"no event of the kind {', '.join(missing)}"
    return None if result["checkpoint"] else "no checkpoint was saved"


def job(
    name: str, run: dict[str, Any], *, keep: Path | None = None, start: Path | None = None
) -> dict[str, Any]:
    """Return a job in the format of server.py."""
    return {
        "name": name,
        "options": list(run["options"]),
        "phases": run["phases"],
        "keep": str(keep) if keep else None,
        "start": str(start) if start else None,
    }


def execute(checkout: Path, jobs: list[dict[str, Any]], cores: int) -> dict[str, dict[str, Any]]:
    """Execute `jobs` with `checkout`, each in its own fork of a warm interpreter. Return the results by name."""
    if not (checkout / "train.py").exists():
        raise SystemExit(f"{checkout} is no checkout of forge: it has no train.py")
    # This folder and its run directories are deleted afterwards. A failed run's result includes its output.
    with tempfile.TemporaryDirectory(prefix="forge-refactoring-") as work:
        config = Path(work, "table.toml")
        config.write_text(CONFIG)
        for one in jobs:
            one["folder"] = str(Path(work, slug(one["name"])))
            one["options"] = [f"--config={config}", "--run.name=run", *one["options"]]
        spec = {"checkout": str(checkout), "cores": cores, "jobs": jobs}
        Path(work, "jobs.json").write_text(json.dumps(spec))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        environment |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        server = [sys.executable, "-P", str(HERE.with_name("server.py")), str(Path(work, "jobs.json"))]
        subprocess.run(server, cwd=checkout, env=environment, check=True)
        return {one["name"]: read_result(Path(one["folder"])) for one in jobs}


def read_result(folder: Path) -> dict[str, Any]:
    terminal, result = folder / "terminal.txt", folder / "result.json"
    printed = terminal.read_text()[-3000:] if terminal.exists() else ""
    if not result.exists():
        return {"failure": printed or "no result", "seconds": 0.0}
    return json.loads(result.read_text()) | {"terminal": printed}


def report(problems: dict[str, str | None], results: dict[str, dict[str, Any]], good: str) -> int:
    """Print the problems in full and then a line per run; return the exit code."""
    bad = {name: problem for name, problem in problems.items() if problem}
    for name, problem in bad.items():
        print(f"\n{name}: {problem}")
    width = max(map(len, problems))
    print()
    for name, problem in problems.items():
        outcome = problem.splitlines()[0] if problem else good
        print(f"{name:{width}}  {results[name]['seconds']:5.1f} s  {outcome}")
    count = len(problems)
    print(f"\n{count - len(bad)} of {count} runs {good}" + (f"; first not: {next(iter(bad))}" if bad else ""))
    return 1 if bad else 0


def versions() -> dict[str, str]:
    """Return the versions that affect numbers."""
    from importlib.metadata import version

    return {"python": sys.version.split()[0], "torch": version("torch"), "numpy": version("numpy")}


def kept_folder(file: Path) -> Path:
    """Return the folder of a record's run directories."""
    return file.with_name(file.name + ".d")


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


if __name__ == "__main__":
    sys.exit(main())
