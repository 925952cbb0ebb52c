"""The skip mark of tests for the simulated GPU."""

import os

import pytest

simulated_gpu = pytest.mark.skipif(
    "libsimgpu.so" not in os.environ.get("LD_PRELOAD", ""), reason="there is no simulated GPU: make simgpu"
)
