"""The origin of the history in a run directory, recorded in `origin.json`.

A history is one sequence of optimizer steps. A run directory holds one history: checkpoints, metrics and roll-backs.
The command names the history's origin: step 0, a checkpoint, or the weights of another model.

An origin takes effect once. If a person, torchrun or Slurm repeats the command, forge finds the same origin in the
record and continues the history. If the command names another origin, forge sets aside the old history's files and
begins a new history.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint import read_digest
from forge.checkpoint.folders import is_empty
from forge.config import CommandLine, Config, difference, parse_toml_text
from forge.config.phases import without_microbatches
from forge.observe.json_lines import read_lines
from forge.observe.run_directory import RunDirectory
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_first_rank
from forge.runtime.errors import FAILED, UserError
from forge.runtime.files import replace_atomically

log = logging.getLogger(__name__)

# Sections that define the computation. All other sections may change between two starts of a history.
SETTINGS = ("model", "data", "train", "optimizer", "schedule", "precision", "phase")
# Keys of these sections that do not change the results.
NEUTRAL = (
    "train.micro_batch_size",  # parallel.fallbacks may set it after the loss of a node
    "train.loss_chunk_tokens",
    "train.gc_interval",
    "train.hooks",
    "data.prefetch",
    "data.cache_dir",
    "data.cache_gib",
    "data.validation",
)
_ASIDE = re.compile(r"\.aside-step-(\d+)")


@dataclass(frozen=True)
class Origin:
    """The origin of a history.

    resume, init: the keys of [checkpoint] as given in the command. path: absolute path of the continued checkpoint;
    None: step 0. step: the checkpoint's step. digest: digest of the checkpoint's manifest, to recognise the checkpoint
    after a move.
    """

    resume: str
    init: str
    path: str | None = None
    step: int = 0
    digest: str | None = None


@dataclass(frozen=True)
class Earlier:
    """Facts about earlier starts, read from the run directory. Filled in only on the first rank.

    finished: True if the last start ended with all steps done. saved: the last saved step of the current history; 0: none.
    restarted: True if the launcher has restarted the ranks, and an earlier start of this launch had begun its history.
    """

    finished: bool = False
    saved: int = 0
    restarted: bool = False


def read_earlier(
    directory: RunDirectory, status: dict[str, Any], restarted: bool = False, launch: Sequence[str] = ()
) -> Earlier:
    """Read the facts about earlier starts from `directory`.

    status: content of `status.json` from the last start. restarted: the launcher has restarted this process, perhaps because
    the last start failed after its last step; that start then does not count as finished. launch: the identities of
    this launch; empty: unknown. A launch without a start that has begun its history still is a new command.
    """
    # Whether the events end with all steps done, and the number of later commands that made no step.
    ended, starts = False, 0
    # The launches whose starts have begun their history, the launch of the last start, and whether it has begun.
    launches: set[str | None] = set()
    last_launch: set[str | None] = set()
    begun = False
    saved: list[int] | None = None  # None: no event tells
    for event in read_lines(directory.events, "event"):
        kind = event["event"]
        if kind == "started":
            last_launch = set(event.get("launch", [None]))
            begun = begun and bool(event.get("restarted"))
        elif kind in ("fresh", "resumed", "finished"):
            launches |= last_launch
            begun = True
        if kind == "finished":
            ended, starts = True, 0
        elif kind == "started" and not event.get("restarted"):
            starts += 1
        elif kind in ("fresh", "resumed"):
            ended = False
        if kind == "saved":
            saved = saved or []
            saved.append(int(event["step"]))
        elif kind == "fresh" or (kind == "resumed" and event.get("new")):
            saved = []
        elif kind == "rolled_back" and saved:
            # Later checkpoints were set aside. A roll-back to another run's checkpoint leaves none.
            saved = [step for step in saved if step <= int(event.get("to_step", step))]
        elif kind == "set_aside" and saved:
            aside = {int(match[1]) for name in event["checkpoints"] if (match := _ASIDE.match(name))}
            kept = event.get("kept", max(saved))  # an earlier version of forge did not record it
            saved = [step for step in saved if step not in aside and step <= kept]
    # Events of an earlier version of forge name no launch.
    of_launch = None in launches or not launches.isdisjoint(launch) if launch else begun
    restarted = restarted and of_launch
    finished = (
        ended if restarted and starts else not restarted and (ended or status.get("state") == "finished")
    )
    if saved is None:
        # The events of the history are lost; a refused start writes others. A run is finished or stopped only after a
        # save. Metrics prove that a history exists, although not which steps were saved.
        last = int(status.get("step") or 0) if finished or status.get("state") == "stopped" else 0
        metrics = (int(line["step"]) for line in read_lines(directory.metrics, "step"))
        saved = [last or max(metrics, default=0)]
    return Earlier(finished, saved[-1] if saved else 0, restarted)


def origin_of(config: Config) -> Origin:
    """Return the origin of a new history with `config`. The origin's `step` is 0 until the checkpoint has been read."""
    resume, init = config.checkpoint.resume, config.checkpoint.init
    if resume in ("auto", "none"):
        return Origin(resume, init)
    path = Path(resume).resolve()
    return Origin(resume, init, str(path), digest=read_digest(path))


def read_origin(directory: RunDirectory) -> Origin | None:
    """Return the recorded origin of the history in `directory`; None if none is recorded.

    Raises UserError (exit 2) if the record is invalid.
    """
    try:
        origin = Origin(**json.loads(directory.origin.read_text()))
        if not isinstance(origin.step, int):
            raise TypeError(f"step is {origin.step!r}, not a number")
        return origin
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{directory.origin} cannot be read ({error}); remove this file to let checkpoint.resume take effect again"
        ) from None


def write_origin(directory: RunDirectory, origin: Origin | None) -> None:
    """Record the origin of the history in `directory`. origin None: keep the record. Collective."""
    if origin is not None:
        text = json.dumps(asdict(origin), indent=1)
        on_first_rank("writing origin.json", lambda: replace_atomically(directory.origin, text.encode()))


def new_history_because(config: Config, directory: RunDirectory, earlier: Earlier) -> str | None:
    """Return the reason why `config` begins a new history in `directory`; None if it continues the current history.

    A history without checkpoints is continued by starting again from its origin. A restart by a launcher continues a
    history of the same origin, even with other settings, because nobody typed a command.
    """
    asked = origin_of(config)
    if asked.resume == "auto":
        return None
    began = read_origin(directory)
    if began is None:
        return "the origin of the previous history is not recorded"
    if asked.path is not None:
        # The path may be a symbolic link with a new target, and the checkpoint may have been moved.
        same_place = asked.resume == began.resume or asked.path == began.path
        same_content = asked.digest is not None and asked.digest == began.digest
        return None if same_place or same_content else "the previous history has another origin"
    if began.resume != "none":
        return f"the previous history began with checkpoint.resume = {began.resume}"
    if earlier.finished:
        return "the previous history is finished"
    if earlier.restarted:
        return None
    changed = _changed_settings(config, directory)
    return f"the previous history began with other settings in {changed}" if changed else None


def log_that_origins_count_once(config: Config, path: Path) -> None:
    """Log that the origin in `config` is ignored, because the run resumes from its own checkpoint `path`."""
    for key, value in (("resume", config.checkpoint.resume), ("init", config.checkpoint.init)):
        if value not in ("", "auto"):
            log.info(
                "checkpoint.%s = %s is ignored: the run resumes from its own checkpoint %s. For the key to take "
                "effect, use another run.name",
                key,
                value,
                path.name,
            )


def _changed_settings(config: Config, directory: RunDirectory) -> str:
    """Return, as text, the names of keys that differ from the last start; empty if none differs."""
    saved = not is_empty(directory.checkpoints)
    try:
        text = directory.config.read_text("utf-8")
    except FileNotFoundError:
        if saved:
            raise _unknown_settings(directory, "is missing") from None
        return "config.toml, which is missing"
    except OSError as error:
        raise UserError(f"{directory.config} cannot be read: {error}", FAILED) from None
    try:
        before = parse_toml_text(text, str(directory.config), stored=True, import_classes=False)
    except UserError:
        if saved:
            raise _unknown_settings(directory, "is refused by this version of forge") from None
        return "config.toml, which this version of forge refuses"
    return ", ".join(key for key, old, new in difference(before, config) if _matters(key, old, new))


def _unknown_settings(directory: RunDirectory, problem: str) -> UserError:
    """Return the error of a start that cannot tell whether it continues the checkpoints in `directory`."""
    return UserError(
        f'checkpoint.resume = "none": the run has checkpoints, but {directory.config} {problem}, so forge cannot tell '
        'whether this start has the same settings. To continue the run, set checkpoint.resume = "auto"; to begin a new '
        "history, use another run.name",
        cause=Cause.CHANGED_SETTINGS,
    )


def _matters(key: str, old: Any, new: Any) -> bool:
    """Return whether the change of `key` from `old` to `new` begins a new history under `checkpoint.resume = "none"`."""
    if key in NEUTRAL:
        return False
    if key == "phase":
        return without_microbatches(old or ()) != without_microbatches(new or ())
    return key.partition(".")[0] in SETTINGS or key in ("run.seed", "checkpoint.init")


def refuse_moved_run(command: CommandLine, config: Config) -> None:
    """Raise UserError if --config is the config.toml of a run directory, but its keys name a different run directory.

    Such a command results from moving or renaming a run directory.
    """
    path, target = Path(command.config or ""), Path(config.run.output_dir) / config.run.name
    home = path.resolve().parent
    if path.name != "config.toml" or not (home / "status.json").is_file() or home == target.resolve():
        return
    if {"run.name", "run.output_dir"} & {key for key, _ in command.raw}:
        return
    raise UserError(
        f"{path} belongs to the run in {home}, but its run.output_dir and run.name lead to {target}. To continue the run, "
        f"add --run.output_dir={home.parent} --run.name={home.name}; to begin another, add --run.name=OTHER"
    )
