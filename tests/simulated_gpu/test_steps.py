"""On the simulated GPU every variant trains, no step waits for the device, and the counts match golden.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_gpu import counting, order
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = simulated_gpu

GOLDEN = Path(__file__).with_name("golden.json")


def counted(
    folder: Path, options: list[str], world: int, patch: str = "log_order_of_even_experts"
) -> dict[str, Any]:
    """Train the variant's model for four steps on `world` simulated GPUs; return rank 0's counts."""
    run = Run(folder, *options, base=variants.BASE)
    codes = run.start(world=world, patch=f"tests.simulated_gpu.patches:{patch}").join()
    assert codes == [0] * world, run.output()[-4000:]
    return counting.read(run.path)


def check(name: str, found: dict[str, Any]) -> None:
    """Fail if a step waits, or if the counts of `name` differ from golden.json. UPDATE: write them to it instead."""
    allowed = (
        variants.OFFLOAD
        if "cpu_offload" in str(variants.FOUR.get(name.removeprefix("four: ")))
        else variants.SPLITS
    )
    waits = set(found["waits"]) - allowed
    assert not waits, f"a step waits for the device in {', '.join(sorted(waits))}"
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE"):
        GOLDEN.write_text(json.dumps(dict(sorted((golden | {name: found}).items())), indent=1) + "\n")
    else:
        expected = golden.get(name, found | {"launches": "not counted yet"})
        # Python's garbage collector may free a few kilobytes before or after the peak.
        expected["peak"] = pytest.approx(expected["peak"], rel=1e-3)
        assert found == expected, "make simgpu UPDATE=1 writes the new counts"


@pytest.mark.parametrize("name", variants.ONE)
def test_a_step_on_one_gpu(name: str, tmp_path: Path) -> None:
    check(name, counted(tmp_path, variants.ONE[name], 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants.COMPILED)
def test_a_compiled_step_on_one_gpu(name: str, tmp_path: Path) -> None:
    check(name, counted(tmp_path, variants.COMPILED[name], 1))


@pytest.mark.slow
def test_a_compiled_step_in_cuda_graphs(tmp_path: Path) -> None:
    check(variants.IN_GRAPHS, counted(tmp_path, variants.COMPILED["compiled"], 1, patch="use_cuda_graphs"))


@pytest.mark.parametrize("name", variants.FOUR)
def test_a_step_on_four_gpus(name: str, tmp_path: Path) -> None:
    found = counted(tmp_path, variants.FOUR[name], 4)
    assert not order.check(tmp_path), "a GPU must run collectives of two communicators at once"
    check(f"four: {name}", found | {"nccl": order.volume(order.read(tmp_path)[0])})


def test_activation_offload_frees_blocks_without_a_wait(tmp_path: Path) -> None:
    def of(mode: str) -> dict[str, Any]:
        options = [*variants.LARGER, "--model.n_layers=8", f"--activation_checkpoint.mode={mode}"]
        return counted(tmp_path / mode, options, 1)

    kept, found = of("none"), of("offload")
    stored, fetched = (
        found["copies"][copy] - kept["copies"][copy]
        for copy in ("copy device to pinned", "copy pinned to device")
    )
    assert fetched == stored * 7 // 8 > 0, "the last of eight blocks stays on the device"
    assert found["synchronizations"] == kept["synchronizations"] and not found["waits"]
    assert (found["launches"], found["kernels"]) == (kept["launches"], kept["kernels"])
    assert found["peak"] < 0.8 * kept["peak"]


def test_every_launch_is_counted_by_its_source(tmp_path: Path) -> None:
    run = Run(tmp_path, *variants.FOUR["ep"], base=variants.BASE)
    hook = '--train.hooks=["tests.simulated_gpu.sources:Sources"]'
    patch = "tests.simulated_gpu.patches:log_order_of_even_experts"
    assert run.start(hook, world=4, patch=patch).join() == [0] * 4, run.output()[-4000:]
    rows = [line.split("\t") for line in (run.path / "sources.0").read_text().splitlines()]
    assert sum(int(number) for number, *_ in rows) == counting.read(run.path)["launches"]
    assert {"model/experts.py", "model/dispatch.py"} <= {line.rpartition(":")[0] for *_, line in rows}
