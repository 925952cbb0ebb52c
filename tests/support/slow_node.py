"""A hook that makes the ranks of one node slow: those that are started with SLOW_NODE in their environment."""

import os
import time

from forge.hook import Hook


class SlowNode(Hook):
    def __init__(self, trainer: object):
        self._seconds = 0.2 if "SLOW_NODE" in os.environ else 0.0

    def before_data(self, step: int) -> None:
        # Between the call before and this one the time is that of data. `Stragglers` comes first, so it counts this.
        time.sleep(self._seconds)
