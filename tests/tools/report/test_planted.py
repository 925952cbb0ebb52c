"""A real run on two ranks with three planted defects. Its page names each of them, and nothing else."""

from __future__ import annotations

import re
from html import unescape

import numpy as np
from torch import Tensor

from forge.tools.report.page import make_page
from forge.tools.report.read import read_run
from tests.support.runs import Run
from tests.support.spoil import slow_forward_on_rank_1


def fast_layer_and_slow_rank() -> None:
    """Plant: layer 2 has 100 times the learning rate, and rank 1 computes slowly."""
    from forge.optim.adamw import AdamW

    slow_forward_on_rank_1()
    update = AdamW.step

    def step(self: AdamW, lr: float, skip: Tensor) -> None:
        shards = [shard for group in self._groups for shard in group]
        fast = [shard.data for shard in shards if shard.name.startswith("layers.2.")]
        before = [values.clone() for values in fast]
        update(self, lr, skip)
        for values, old in zip(fast, before, strict=True):
            values.add_(values - old, alpha=99.0)

    AdamW.step = step  # type: ignore[method-assign]


def test_a_fast_layer_a_source_of_noise_and_a_slow_rank_are_named_at_the_head_of_the_page(tmp_path) -> None:
    noise = np.random.default_rng(0).integers(0, 64, 100_000).astype("<u2")
    noise.tofile(tmp_path / "noise.bin")
    sources = (
        f'[{{path="synthetic",weight=3.0}},{{path="{tmp_path / "noise.bin"}",weight=1.0,dtype="uint16"}}]'
    )
    run = Run(
        tmp_path,
        f"--data.sources={sources}",
        "--data.tokenizer=none",
        "--model.n_layers=4",
        "--optimizer.lr=1e-3",
        "--train.steps=30",
        "--checkpoint.interval=0",
        "--metrics.monitor_interval=10",
        "--metrics.sources=true",
        "--resilience.straggler_interval=10",
    )
    patch = "tests.tools.report.test_planted:fast_layer_and_slow_rank"
    assert run.start(world=2, patch=patch).join() == [0, 0], run.output()
    page = make_page([read_run(run.path)])
    head = re.search(r'<ul class="findings">(.*?)</ul>', page)
    assert head is not None
    found = [unescape(one) for one in re.findall(r"<li>(.*?)</li>", head[1])]
    assert re.match(r"Layer 2: its \w+.* \d\d+ times those of the median layer", found[0])
    assert any(re.match(rf"Source {tmp_path}/noise.bin: its loss went from 4\.", one) for one in found)
    assert any(one.startswith("Rank 1 is slow: reported ") and "its forward took" in one for one in found)
    assert not any(re.match(r"Layer [013]|Source synthetic|Rank 0", one) for one in found)
