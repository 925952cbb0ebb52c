"""What makes a test's outcome its own: not the machine's load, nor the tests before it, nor the day."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.harness import end_ranks

# Examples are the same in every run, and none fails for having waited for a processor.
settings.register_profile(
    "forge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("forge")


@pytest.fixture(autouse=True)
def by_itself() -> Iterator[None]:
    """Each test draws the same numbers, whichever were run before it, and leaves no process behind."""
    torch.manual_seed(0)
    yield
    end_ranks()
