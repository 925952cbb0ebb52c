"""Every variant of the simulated GPU on a real one: no step waits for the device, and the losses are those of a CPU.

The name lets pytest run this file first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated_gpu import variants
from tests.support.no_waits import NO_WAITS
from tests.support.runs import Run

pytestmark = pytest.mark.gpu
BASE = [option for option in variants.BASE if not option.startswith("--train.hooks")]


@pytest.mark.parametrize("name", variants.ONE)
def test_no_step_waits_for_the_gpu(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *variants.ONE[name], NO_WAITS, base=BASE)
    assert run() == 0, run.output()[-4000:]
