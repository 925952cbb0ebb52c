"""A process's settings before it joins the process group."""

from __future__ import annotations

import pytest

from forge.runtime.world import use_expandable_segments


def test_the_cuda_allocator_uses_expandable_segments() -> None:
    environment: dict[str, str] = {}
    use_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_win(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    use_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
