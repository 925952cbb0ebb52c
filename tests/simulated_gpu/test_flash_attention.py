"""The hook of docs/internals/performance.md lets every step call FlashAttention-3, here a stub that computes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.simulated_gpu import counting
from tests.simulated_gpu.needed import simulated_gpu
from tests.support import gpu_variants as variants
from tests.support.runs import Run

pytestmark = simulated_gpu
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "performance.md"
# The arguments of FlashAttention-3's operators, as PyTorch's torch/nn/attention/_fa3.py passes them.
STUB = """
import json, os
import torch

library = torch.library.Library("flash_attn_3", "DEF")
FWD = "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor? out, Tensor? a, Tensor? b, Tensor? c, "
FWD += "Tensor? d, Tensor? e, int? max_q, int? max_k, Tensor? f, Tensor? g, Tensor? h, Tensor? i, Tensor? j, Tensor? l, "
FWD += "Tensor? m, Tensor? n, Tensor? o, float? scale, bool causal, int left, int right, int chunk, float cap, "
FWD += "bool interleaved, Tensor? p, int splits, bool? pack, int margin"
BWD = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
BWD += "Tensor? a, Tensor? b, Tensor? c, Tensor? d, int? max_q, int? max_k, float? scale, bool causal, int left, int right, "
BWD += "float cap, bool deterministic, int margin"
library.define(f"fwd({FWD}) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(f"bwd({BWD}) -> ()")
calls = {"forward": 0, "backward": 0}

def count(name):
    calls[name] += 1
    with open(os.environ["RUN_UNDER_TEST"] + "/../calls.json", "w") as file:
        json.dump(calls, file)

def forward(q, k, v, *rest):
    count("forward")
    assert rest[21] is True, "causal"
    batch, seq, heads, _ = q.shape
    lse = torch.zeros(batch, heads, seq, device=q.device)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(0)

library.impl("fwd", forward, "CUDA")
library.impl("bwd", lambda *arguments: count("backward"), "CUDA")
"""
# Layers times microbatches times steps.
CALLS = 2 * 4 * 4


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ([], 1),
        (["--activation_checkpoint.mode=full"], 2),
        pytest.param(variants.COMPILE, 1, marks=pytest.mark.slow),
    ],
    ids=["plain", "recomputed", "compiled"],
)
def test_attention_calls_the_package(options: list[str], forwards: int, tmp_path: Path) -> None:
    (hook,) = re.findall(r"\*\*flash\.py\*\*.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "flash.py").write_text(hook)
    (tmp_path / "flash_attn_interface.py").write_text(STUB)
    hooks = '--train.hooks=["flash:FlashAttention","tests.simulated_gpu.counting:Counting"]'
    run = Run(tmp_path, *options, hooks, base=variants.BASE)
    assert run.start(patch="tests.simulated_gpu.patches:install_flash_attention").join() == [0], run.output()
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert calls == {"forward": forwards * CALLS, "backward": CALLS}
    assert not counting.read(run.path)["waits"]
