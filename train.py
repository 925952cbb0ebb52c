#!/usr/bin/env python
"""Pretrain a language model: `python train.py --config debug.toml [--section.key=value ...]`, or under torchrun or srun.

`--help` lists every key.
"""

import os
import sys

from forge.resilience.stopping import StopSignals

if __name__ == "__main__":
    # Importing torch takes seconds, in which a signal has to end the run in the same way as later.
    with StopSignals():
        from forge.train.launch import main

        code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Communication threads of a failed peer group may never join; everything worth keeping is on disk by now.
    os._exit(code)
