"""Golden files count existing variants and configs, and docs/internals/performance.md shows the counts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.simulated_gpu.shipped import CONFIGS, OF_FOUR
from tests.support import gpu_variants as variants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def golden(name: str) -> dict[str, dict]:
    return json.loads((HERE / name).read_text())


def test_counts_are_of_existing_variants() -> None:
    four = {f"four: {name}" for name in variants.FOUR}
    assert set(golden("golden.json")) == {*variants.ONE, *variants.COMPILED, variants.IN_GRAPHS, *four}


def test_the_note_on_cuda_graphs_shows_the_counts() -> None:
    plain, graphs = (golden("golden.json")[name] for name in ("compiled", variants.IN_GRAPHS))
    copies = [counts["copies"]["copy device to device"] for counts in (plain, graphs)]
    page = (ROOT / "docs" / "internals" / "notes" / "cuda-graphs.md").read_text()
    of_graphs = graphs["kernels"]["CUDA graph"]
    for row in (
        f"| launches | {plain['launches']} | {graphs['launches']}, of them {of_graphs} of graphs |",
        f"| copies within the device | {copies[0]} | {copies[1]} |",
        f"The remaining {graphs['launches'] - of_graphs} launches",
    ):
        assert row in page


def test_kernels_are_of_shipped_configs_for_both_generations() -> None:
    assert set(golden("golden_compiled.json")) == {
        f"{name} sm_{sm}" for name in [*CONFIGS, *OF_FOUR] for sm in (90, 100)
    }


def test_the_page_shows_the_attention_of_each_shipped_config() -> None:
    found = golden("golden_compiled.json")
    rows = [
        f"| `{name}` | {' and '.join(found[f'{name} sm_90']['attention'])} | {len(found[f'{name} sm_90']['kernels'])} | "
        f"{spilling(found[f'{name} sm_90'])} | {spilling(found[f'{name} sm_100'])} |"
        for name in [*CONFIGS, *OF_FOUR]
    ]
    missing = [
        row
        for row in rows
        if row not in (ROOT / "docs" / "internals" / "performance.md").read_text().splitlines()
    ]
    assert not missing, "\n".join(missing)
    assert all(
        found[f"{name} sm_90"]["attention"] == found[f"{name} sm_100"]["attention"]
        for name in [*CONFIGS, *OF_FOUR]
    )


def spilling(counts: dict) -> str:
    """Return the number of kernels that spill registers in every block size, and the most spilled bytes per thread."""
    spilled = [kernel["spilled"][0] for kernel in counts["kernels"].values() if kernel["spilled"][0]]
    return f"{len(spilled)} ({max(spilled):,} bytes)" if spilled else "none"
