#!/usr/bin/env python
"""Pretrain a language model: `python train.py --config debug.toml [--section.key=value ...]`, or under torchrun or srun.

`--help` lists every key.
"""

import contextlib
import os
import sys

from forge.resilience.stopping import StopSignals

if __name__ == "__main__":
    # A standard stream that the caller has closed would give its number to a file of the run, and messages would go there.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    # Importing torch takes seconds, in which a signal has to end the run in the same way as later.
    with StopSignals():
        from forge.run.launch import main

        code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, OSError
        ):  # it was closed from the start, or its reader is gone
            stream.flush()
    # Communication threads of a failed peer group may never join; everything worth keeping is on disk by now.
    os._exit(code)
