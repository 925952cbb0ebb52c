"""Whole runs of train.py on one CUDA GPU: every feature trains, and computes the same as on a CPU.

Multiple ranks are impossible, because NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forge.checkpoint.folders import step_name

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu
# Sizes valid for flex_attention (head_dim >= 16), float8 and grouped products (multiples of 16).
BASE = [
    "--config=debug.toml",
    "--run.name=run",
    "--model.dim=128",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.ffn_dim=256",
    "--model.vocab_size=256",
    '--data.sources=[{path="synthetic",weight=1.0}]',
    "--data.validation=[]",
    "--train.seq_len=256",
    "--train.global_batch_size=8",
    "--train.micro_batch_size=2",
    "--train.steps=12",
    "--optimizer.lr=1e-2",
    "--schedule.name=constant",
    "--schedule.warmup_steps=0",
    "--precision.compute=bfloat16",
    "--evaluate.interval=0",
    "--evaluate.sample_interval=0",
    "--metrics.log_interval=1",
    "--metrics.tensorboard=false",
    "--checkpoint.interval=0",
]
NARROW = ("--precision.storage=bfloat16", "--precision.reduce=bfloat16", "--optimizer.moment_dtype=bfloat16")
COMPILED = ("--compile.enabled=true", "--compile.loss=true")
EXPERTS = ('--model.moe={n_experts = 4, top_k = 2, expert_dim = 64, balance = "bias"}',)
DOCUMENTS = ("--data.document_mask=true",)
MUON = ("--optimizer.name=muon", "--optimizer.muon.second_moment=neuron", "--optimizer.muon.split_heads=true")
# Variants of one model, with the same initial loss up to rounding to bfloat16.
SAME_ON_BOTH: dict[str, tuple[str, ...]] = {
    "fsdp2": ("--parallel.reshard_after_forward=always",),
    "zero1": ("--parallel.data_parallel=zero1",),
    "zero2": ("--parallel.data_parallel=zero2",),
    "narrow state": NARROW,
    "muon": MUON,
    "muon, offloaded": (*MUON, "--parallel.cpu_offload=true"),
    "lion": ("--optimizer.name=lion", "--optimizer.lr=3e-3"),
    "offloaded": ("--parallel.cpu_offload=true",),
    "recomputed": ("--activation_checkpoint.mode=full",),
    "partly recomputed": ("--activation_checkpoint.mode=selective",),
    "compiled": COMPILED,
    "compiled, recomputed": (*COMPILED, "--activation_checkpoint.mode=full"),
    "compiled, partly recomputed": (*COMPILED, "--activation_checkpoint.mode=selective"),
    "compiled, memory budget": (*COMPILED, "--activation_checkpoint.mode=memory_budget"),
    "compiled update": ("--compile.optimizer=true", "--optimizer.moment_dtype=bfloat16"),
    "compiled, zero1": (*COMPILED, "--compile.optimizer=true", "--parallel.data_parallel=zero1"),
    "deterministic": ("--run.deterministic=true",),
    "float8 rowwise": ("--precision.float8=rowwise",),
    "float8 tensorwise": ("--precision.float8=tensorwise", *COMPILED),
}
# Other models.
OTHERS: dict[str, tuple[str, ...]] = {
    "documents": DOCUMENTS,
    "documents, compiled": (*DOCUMENTS, *COMPILED),
    "short documents": (*DOCUMENTS, "--train.seq_len=64"),
    "documents, partly recomputed": (*DOCUMENTS, "--activation_checkpoint.mode=selective"),
    "window and cap": ("--model.sliding_window=100", "--model.attention_soft_cap=20.0", *COMPILED),
    "experts": EXPERTS,
    "experts, offloaded": (*EXPERTS, "--parallel.cpu_offload=true"),
    "experts, compiled, partly recomputed": (
        *EXPERTS,
        *COMPILED,
        "--activation_checkpoint.mode=selective",
    ),
    "experts, muon": (*EXPERTS, *MUON),
    "experts, deterministic": (*EXPERTS, "--run.deterministic=true"),
}


class Run:
    """A run directory and its command."""

    def __init__(self, folder: Path, *options: str):
        self.path = folder / "run"
        self._options = [*BASE, f"--run.output_dir={folder}", *options]

    def __call__(self, *options: str, cpu: bool = False) -> None:
        command = [sys.executable, str(ROOT / "train.py"), *self._options, *options]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without clock-dependent and memory fields."""
        kept = ("step", "loss", "grad_norm", "lr", "tokens")
        lines = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        return [{key: line[key] for key in kept} for line in lines]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = Run(tmp_path_factory.mktemp("plain"))
    run()
    return run.losses()


def test_a_plain_run_learns(plain: list[float]) -> None:
    assert plain[-1] < plain[0] - 0.5


@pytest.mark.parametrize("name", SAME_ON_BOTH)
def test_a_variant_of_the_same_model_learns_from_the_same_start(
    name: str, plain: list[float], tmp_path: Path
) -> None:
    """Also under cpu_offload, the GPU draws the initial values."""
    if "float8" in name and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    run = Run(tmp_path, *SAME_ON_BOTH[name])
    run()
    losses = run.losses()
    assert losses[0] == pytest.approx(plain[0], abs=0.05) and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_learns(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, *OTHERS[name])
    run()
    assert run.losses()[-1] < run.losses()[0] - 0.5


@pytest.mark.parametrize(
    "options", [(), DOCUMENTS, EXPERTS, MUON], ids=["dense", "documents", "experts", "muon"]
)
def test_in_float64_a_gpu_and_a_cpu_compute_the_same(options: tuple[str, ...], tmp_path: Path) -> None:
    wide = [f"--precision.{use}=float64" for use in ("storage", "compute", "reduce")]
    start = Run(tmp_path / "start", *wide, *options)
    start("--train.steps=1", cpu=True)
    histories = []
    for name in ("cpu", "cuda"):
        weights = start.path / "checkpoints" / step_name(1)
        run = Run(tmp_path / name, *wide, *options, f"--checkpoint.init={weights}", "--train.steps=4")
        run(cpu=name == "cpu")
        histories.append([(line["loss"], line["grad_norm"]) for line in run.lines()])
    for cpu, cuda in zip(*histories, strict=True):
        assert cuda == pytest.approx(cpu, rel=1e-8)


def test_a_resumed_run_is_bit_identical_to_an_undisturbed_one(tmp_path: Path) -> None:
    exact = ("--run.deterministic=true", "--checkpoint.interval=4", *DOCUMENTS)
    whole, resumed = Run(tmp_path / "whole", *exact), Run(tmp_path / "resumed", *exact)
    whole()
    resumed("--train.steps=6")
    resumed()
    assert resumed.lines() == whole.lines()


def test_a_profile_holds_kernels_and_a_snapshot_of_the_memory(tmp_path: Path) -> None:
    run = Run(tmp_path, "--profile.span=[3,4]", "--profile.memory_snapshot=true", "--train.steps=5")
    run()
    written = {path.suffix: path for path in run.path.rglob("rank-0-steps-3-4*")}
    assert set(written) == {".gz", ".pickle"}
    events = json.loads(gzip.decompress(written[".gz"].read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.parametrize("window", [0, 16])
def test_a_trained_model_generates_the_same_text_on_gpu_and_cpu(window: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "--precision.compute=float32", "--train.steps=8", f"--model.sliding_window={window}")
    run()
    command = [sys.executable, str(ROOT / "scripts/generate.py"), "--checkpoint", str(run.path), "--json"]
    command += ["--prompt-ids", "1,2,3", "--max-tokens", "40", "--temperature", "0"]
    texts = []
    for device in ("cpu", "cuda"):
        done = subprocess.run([*command, "--device", device], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)["tokens"])
    assert texts[0] == texts[1] and len(texts[0]) == 40
