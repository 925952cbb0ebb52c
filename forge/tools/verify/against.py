"""Compare one layout under two checkouts of forge, to show the effect of a code change.

A second process imports the other checkout's `forge`, except for `forge/tools/verify`, which comes from this checkout. Both
processes thus record with the same code, but run their own models, parallelism and optimizers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from forge.runtime.errors import UserError
from forge.tools.verify.compare import Comparison, Difference, difference_of, largest
from forge.tools.verify.pieces import TensorKey, TensorPiece, whole
from forge.tools.verify.ranks import RankFailed, limit_s, run_ranks
from forge.tools.verify.record import RankRecord, RankStep, Settings, record_on_rank

# Seconds in addition to the ranks' time limit, for importing forge and stopping the ranks in the second process.
EXTRA_S = 120.0
_CODE = "import sys; from forge.tools.verify.against import record_to; record_to(*sys.argv[1:])"


def require_checkout(checkout: Path) -> None:
    """Raise UserError unless the folder `checkout` contains `forge/tools/verify`."""
    if not (checkout / "forge" / "tools" / "verify").is_dir():
        raise UserError(f"--against {checkout}: is not a checkout of forge with a folder forge/tools/verify")


def record_elsewhere(checkout: Path, text: str, world: int, settings: Settings) -> list[RankRecord]:
    """Run the configuration `text` on `world` ranks with the forge of `checkout`; return one recording per rank.

    Raises UserError if the run fails or hangs. At the end all processes of the run are killed.
    """
    with tempfile.TemporaryDirectory(prefix="forge-against-") as name:
        folder = Path(name)
        tools = folder / "forge" / "tools"
        tools.mkdir(parents=True)
        for path in (checkout / "forge").resolve().iterdir():
            if path.name not in ("tools", "__pycache__"):
                (folder / "forge" / path.name).symlink_to(path)
        for path in (checkout / "forge" / "tools").resolve().iterdir():
            if path.name not in ("verify", "__pycache__"):
                (tools / path.name).symlink_to(path)
        (tools / "verify").symlink_to(Path(__file__).resolve().parent)
        request, answer = folder / "request", folder / "answer"
        request.write_bytes(pickle.dumps((text, world, settings, limit_s(world))))
        command = [sys.executable, "-c", _CODE, str(request), str(answer)]
        search = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            command,
            cwd=folder,  # `python -c` imports from the working directory first
            env={**os.environ, "PYTHONPATH": search},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=limit_s(world) + EXTRA_S)
        except subprocess.TimeoutExpired:
            errors = f"no result within {limit_s(world) + EXTRA_S:.0f} s"
        finally:
            # The second process, its ranks and their fork server share one session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() or not answer.exists():
            problem = errors.strip().splitlines()[-1] if errors.strip() else "no message"
            raise UserError(
                f"--against {checkout}: the forge of that checkout fails on this configuration: {problem}"
            )
        return pickle.loads(answer.read_bytes())


def record_to(request: str, answer: str) -> None:
    """Run the request pickled in the file `request`. Write the recordings to the file `answer`.

    The second process calls this function with the other checkout's forge. The process exits with 1 if a rank fails.
    """
    text, world, settings, limit = pickle.loads(Path(request).read_bytes())
    try:
        ranks = run_ranks(record_on_rank, world, text, settings, timeout=limit)
    except RankFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    Path(answer).write_bytes(pickle.dumps(ranks))


def keep_steady(records: Sequence[RankRecord], again: Sequence[RankRecord]) -> None:
    """Remove from `records` the hooks' curves that differ from those of `again`, a second recording, e.g. times."""
    for one, other in zip(records, again, strict=True):
        for step, second in zip(one.steps, other.steps, strict=True):
            for key in [key for key in step.pieces if key[0] == "curve"]:
                pairs = zip(step.pieces[key], second.pieces.get(key, []), strict=False)
                if key not in second.pieces or not all(torch.equal(a.values, b.values) for a, b in pairs):
                    del step.pieces[key]


def compare_records(
    new: Sequence[RankRecord], old: Sequence[RankRecord], bound: float
) -> tuple[Comparison, list[str]]:
    """Compare two recordings of one layout, rank by rank. Return the differences, and the modules in computation order.

    bound: allowed difference of a tensor, relative to its largest element; 0: bitwise equality. A Difference has the index
    in the rank's local tensor.
    """
    result = Comparison()
    order: list[str] = []
    for rank, (mine, theirs) in enumerate(zip(new, old, strict=True)):
        for number, (now, then) in enumerate(zip(mine.steps, theirs.steps, strict=True)):
            before = dict(_tensors(then))
            order = list(dict.fromkeys([*order, *(one.name for one in now.seen if one.output)]))
            for (key, _), piece, other in _paired(dict(_tensors(now)), before, result.unplaced):
                expected = other.values
                equal = Difference(number, *key, rank, (), 0.0, 0.0, 0.0)
                found = difference_of(equal, expected, [whole(piece.values)], largest(expected) or 1.0)
                result.compared += 1
                result.largest[key[0]] = max(result.largest.get(key[0], 0.0), found.size)
                if found.size > bound:
                    result.differences.append(found)
    return result, order


def _tensors(step: RankStep) -> Iterator[tuple[tuple[TensorKey, int], TensorPiece]]:
    """Yield ((key, number), piece) for all tensors of a step on one rank.

    number: counts the boxes of a sharded tensor, or the microbatches of an activation. It begins at 0 for each key.
    """
    numbers: Counter[TensorKey] = Counter()
    for key, pieces in step.pieces.items():
        for number, piece in enumerate(pieces):
            yield (key, number), piece
    for one in step.seen:
        key = "output" if one.output else "input", one.name
        yield (key, numbers[key]), whole(one.values)
        numbers[key] += 1


def _paired(
    now: dict[tuple[TensorKey, int], TensorPiece],
    then: dict[tuple[TensorKey, int], TensorPiece],
    unpaired: set[str],
) -> Iterator[tuple[tuple[TensorKey, int], TensorPiece, TensorPiece]]:
    """Yield (key, piece of `now`, piece of `then`) for each tensor with equal shapes in both recordings.

    Add the names of all other tensors to `unpaired`. Raises UserError if one recording lacks an initial value, gradient or
    parameter of the other, or has it in another shape.
    """
    for place in {**then, **now}:
        (kind, name), _ = place
        mine, theirs = now.get(place), then.get(place)
        if mine is not None and theirs is not None and mine.values.shape == theirs.values.shape:
            yield place, mine, theirs
        elif kind in ("initial", "gradient", "parameter"):
            shapes = [None if one is None else tuple(one.values.shape) for one in (theirs, mine)]
            raise UserError(
                f"--against: the {kind} {name} has shape {shapes[0]} in that checkout, but {shapes[1]} in this one"
            )
        else:
            unpaired.add(f"{kind} {name}")
