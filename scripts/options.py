"""Common code of all scripts: exit codes, and option types for numbers and inputs. Imports no torch."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED, STOPPED, UserError, is_wrong_path, nearest
from forge.runtime.files import why_not_local
from forge.tools.prepare.corpus import EXTENSIONS

Number = TypeVar("Number", int, float)


class Options(argparse.ArgumentParser):
    """The argument parser of a script. A mistake ends the script with one sentence on stderr and exit code 2."""

    def __init__(self, **rest: Any):
        super().__init__(
            **{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **rest}
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        similar = nearest(unknown[1], self._option_string_actions) if unknown else None
        hint = f"did you mean {similar}? " if similar else ""
        self.exit(BAD_CONFIG, f"forge: {message}; {hint}{self.prog} --help lists the options\n")


def exit_code_of(work: Callable[[], object], interrupted: str = "") -> int:
    """Call `work` and return the exit code. An expected error becomes one sentence on stderr.

    interrupted: sentence printed after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        work()
        if sys.stdout is not None:  # it was closed from the start, by `>&-`
            sys.stdout.flush()
    except UserError as error:
        print(f"forge: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # e.g. a full disk
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"forge: {where}{error.strerror or error}", file=sys.stderr)
        return BAD_CONFIG if is_wrong_path(error) else FAILED
    except (RuntimeError, MemoryError) as error:
        # torch.OutOfMemoryError, without importing torch, or the error of PyTorch's allocator on a CPU.
        of_memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
        if not of_memory and "DefaultCPUAllocator" not in str(error):
            raise
        print(f"forge: out of memory: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        if interrupted:
            print(f"\n{interrupted}", file=sys.stderr)
        return STOPPED
    return FINISHED


def exit_code_of_ranks(work: Callable[[Any], object], interrupted: str = "") -> int:
    """Call `work` with this process's World and return the exit code. Only rank 0 prints an error."""
    from forge.runtime.world import read_world

    def as_rank() -> None:
        world = read_world()
        try:
            work(world)
        except UserError as error:
            if world.rank == 0:
                raise
            # When a rank ends, the launcher kills the other ranks. Give rank 0 time to print.
            time.sleep(2)
            raise SystemExit(error.exit_code) from None

    return exit_code_of(as_rank, interrupted)


def number(kind: type[Number], holds: Callable[[Number], bool], allowed: str) -> Callable[[str], Number]:
    """Return a `type` for argparse that accepts numbers of type `kind` if `holds` returns True.

    allowed: description of these numbers in messages, after "must be".
    """

    def read(text: str) -> Number:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text}")
        return value

    read.__name__ = kind.__name__  # for argparse's message "invalid int value"
    return read


positive = number(int, lambda value: value >= 1, "at least 1")
count = number(int, lambda value: value >= 0, "at least 0")
port = number(int, lambda value: 0 <= value < 2**16, "from 0 to 65535")


def local_path(text: str) -> Path:
    """Return the path `text` of a file or folder to write. A `type` for argparse."""
    if (reason := why_not_local(text)) is not None:
        raise argparse.ArgumentTypeError(reason)
    return Path(text)


def require_output(path: Path) -> None:
    """Raise UserError if the file `path`, given as --output, cannot be written. Call it before long work."""
    if os.path.isdir(path):
        raise UserError(f"--output {path}: is a folder; name a file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"--output {path}: is not a regular file, e.g. a device; name a file")
    if not os.access(path.parent, os.W_OK):
        why = "cannot be written" if os.path.isdir(path.parent) else "is not an existing folder"
        raise UserError(f"--output {path}: {path.parent} {why}")


def add_trust_option(add: Callable[..., object]) -> None:
    """Add the option --trust, which allows imports named in the config.toml of an opened folder."""
    add("--trust", action="store_true", help="import classes and functions named by an opened config.toml")


def add_input_options(add: Callable[..., object]) -> None:
    """Add the options for the input text. They are arguments of `find_corpus` and `read_documents`."""
    add("--input", nargs="+", required=True, metavar="PATH", help="files, or directories to search")
    add(
        "--text-key", default="text", metavar="KEY", help="key of the text in JSONL and Parquet (%(default)s)"
    )
    names = " ".join(EXTENSIONS)
    add(
        "--extensions",
        nargs="+",
        default=EXTENSIONS,
        metavar="EXT",
        help=f"file name extensions to read in directories, also compressed: .txt reads .txt.gz, too ({names})",
    )
