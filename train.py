#!/usr/bin/env python
"""Pretrain a language model: `python train.py --config debug.toml [--section.key=value ...]`, or under torchrun or srun.

`--help` lists every key.
"""

import contextlib
import os
import sys

from forge.resilience.stopping import StopSignals

if __name__ == "__main__":
    # If the caller closed a standard stream, the next file to be opened would get its descriptor, and messages would go
    # into that file. So put /dev/null on closed standard streams first.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    # Importing torch takes seconds. A signal in this time must end the run as it does later.
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
