"""A conversion holds a few tensors at a time, never the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from forge.config.model import ModelConfig
from forge.tools.hf.model_config import write_model
from forge.tools.hf.safetensors import Planned, write_tensors
from forge.tools.hf.table import BY_NAME
from forge.tools.hf.tensors import weights_of
from tests.support.harness import start_ranks

# Every expert layer has one tensor of 8 MiB and one of 4 MiB; 100 MiB together.
MODEL = {
    "dim": 256,
    "n_layers": 8,
    "n_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 1024,
    "qk_norm": True,
    "moe": {"n_experts": 16, "expert_dim": 256, "balance": "none"},
}
LARGEST = 16 * 2 * 256 * 256 * 4
# forge's tensor, DCP's copy of it, the previous tensor, and memory cached by the allocator.
BOUND = 4 * LARGEST


def test_a_conversion_holds_few_tensors_at_a_time(tmp_path: Path) -> None:
    model = ModelConfig.model_validate(MODEL)
    architecture = BY_NAME["Qwen3MoeForCausalLM"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(write_model(model, architecture, 64)))
    planned = [
        Planned(name, torch.float32, weight.their_shape)
        for weight in weights_of(model, architecture)
        for name in weight.theirs
    ]
    total = sum(tensor.nbytes for tensor in planned)
    assert total > 3 * BOUND
    for _ in write_tensors(theirs, planned, (torch.ones(tensor.shape) for tensor in planned), 10_000_000):
        pass
    assert start_ranks(_convert, 1, tmp_path).join() == [0]
    peaks = json.loads((tmp_path / "peaks").read_text())
    assert all(peak < BOUND for peak in peaks), f"{peaks} bytes; allowed {BOUND}, the model has {total}"


def _convert(rank: int, world: int, folder: Path) -> None:
    from forge.tools.hf import export_weights, import_weights

    torch.set_num_threads(1)
    peaks: list[int] = []
    before = _own_bytes()
    with _measured(peaks, before):
        import_weights(folder / "theirs", folder / "ours")
    with _measured(peaks, before):
        export_weights(folder / "ours", folder / "back", dtype=torch.bfloat16, shard_bytes=20_000_000)
    (folder / "peaks").write_text(json.dumps(peaks))


@contextmanager
def _measured(peaks: list[int], before: int) -> Iterator[None]:
    """Appends by how much this process's own memory, mapped files not counted, was above `before` at most."""
    done, seen = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(_own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    done.set()
    watcher.join()
    peaks.append(max(seen) - before)


def _own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
