"""What a process sets up before it joins the others."""

from __future__ import annotations

import pytest

from forge.runtime.world import use_expandable_segments


def test_the_allocator_of_cuda_grows_its_segments() -> None:
    environment: dict[str, str] = {}
    use_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_sets_for_the_allocator_counts(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    use_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
