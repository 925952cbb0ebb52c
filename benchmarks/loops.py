"""The contenders: forge's own training step, a plain PyTorch loop of the same model, and transformers' Llama."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.measure import Contender, require_learning, take_turns
from forge.batch import Batch
from forge.checkpoint import Checkpoints
from forge.config import Config, check_world, load_config
from forge.data.build import build_dataset, open_data
from forge.data.loader import Loader
from forge.hook import Hooks
from forge.model import IGNORE, flops_per_token
from forge.observe.hardware import peak_flops
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.parallel.build import build_meta_model
from forge.parallel.initialize import initialize
from forge.parallel.precision import DTYPES
from forge.resilience.stopping import StopSignals
from forge.run.history import History
from forge.run.hooks import make_hooks
from forge.run.resume import Start
from forge.run.save import Saves
from forge.run.tiers import Tiers
from forge.runtime.world import World, join, read_world
from forge.shard import Shard
from forge.train.trainer import Trainer

# Learnable data without a file. No schedule, so that the loss falls within a few steps. No pauses for saves or evaluation.
LEARNABLE = (
    '--data.sources=[{path="synthetic",weight=1.0}]',
    "--data.validation=[]",
    "--schedule.name=constant",
    "--schedule.warmup_steps=0",
    "--train.steps=1000000",
    "--evaluate.interval=0",
    "--evaluate.sample_interval=0",
    "--checkpoint.interval=0",
    "--metrics.tensorboard=false",
    # With a log line per step, the last losses in the table belong to the same step.
    "--metrics.log_interval=1",
    # The contenders share one interpreter, so none may change the garbage collector.
    "--train.gc_interval=0",
)
# A toy model; its loss falls within four steps.
TINY = (
    "--model.dim=32",
    "--model.n_layers=1",
    "--model.n_heads=2",
    "--model.n_kv_heads=1",
    "--model.ffn_dim=64",
    "--model.vocab_size=64",
    "--train.seq_len=64",
    "--train.global_batch_size=4",
    "--train.micro_batch_size=2",
    "--optimizer.lr=1e-2",
)


def configure(config: str, *overrides: str) -> Config:
    """Return the config with the benchmarks' settings, then `overrides`; later overrides win."""
    return load_config(["--config", config, *LEARNABLE, *overrides])


def settings_of(
    given: argparse.Namespace, config: Config, device: torch.device, **more: Any
) -> dict[str, Any]:
    """Return the settings of a measurement, for a results file."""
    return {
        "config": Path(given.config).stem,
        "device": device.type,
        "compute": config.precision.compute,
        "dim": config.model.dim,
        "layers": config.model.n_layers,
        "vocab": config.model.vocab_size,
        **more,
        "seq_len": config.train.seq_len,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": config.train.micro_batch_size,
        "rounds": given.rounds,
        "steps per round": given.steps,
        "warm-up steps": given.warmup,
    }


def joined() -> World:
    """Return the World of this process; all ranks are on this machine. The first call joins the process group."""
    if not dist.is_initialized():
        join(read_world())
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, local_rank=rank, launcher="torchrun" if size > 1 else "python", local_size=size)


class ForgeLoop:
    """forge's training loop with the hooks of train.py; the run directory `folder` is not locked.

    saves: the hook that writes checkpoints to `checkpoints`, for the caller to use.
    """

    def __init__(self, name: str, config: Config, folder: Path, mode: str = "async"):
        self.name, self.config = name, config
        world = joined()
        degrees = check_world(config, world.size)
        directory = RunDirectory(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = directory.metrics
        self.checkpoints = Checkpoints(directory.checkpoints, keep_last=1, mode=mode)  # type: ignore[arg-type]
        self.trainer = Trainer(
            config,
            degrees,
            open_data(config),
            Reporter(directory, world),
            StopSignals(),
        )
        history, start = History(self.trainer, self.checkpoints), Start(None, kept=-1)
        history.load(start)
        hooks = make_hooks(self.trainer, self.checkpoints, [], Tiers(config, self.checkpoints, directory))
        history.begin(start)
        (self.saves,) = (hook for hook in hooks if isinstance(hook, Saves))
        self.trainer.hooks = Hooks(hooks)
        self._run = self.trainer.hooks.around_run(step=0)
        self._run.__enter__()

    def step(self) -> None:
        with self.trainer.hooks.around("step", self.trainer.progress.step + 1):
            self.trainer.step()

    def losses(self) -> list[float]:
        self.trainer.process_last_result()
        if dist.get_rank():
            return []  # rank 0 has the metrics
        lines = map(json.loads, self._metrics.read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        return [float("nan") if loss is None else loss for loss in losses]

    def close(self) -> None:
        self._run.__exit__(None, None, None)
        self.trainer.batches.close()


class BareLoop:
    """forge's model and initial weights in a plain loop with PyTorch's loss and AdamW, without metrics.

    All batches are on the device before the first step, so reading data costs no time. Computes in `precision.compute` by
    autocast. With several processes, fully_shard shards each layer.
    """

    def __init__(self, name: str, config: Config, batches: list[Batch], device: torch.device):
        self.name, self.config = name, config
        self._batches, self._next = batches, 0
        self._losses: list[Tensor] = []
        self._narrow = config.precision.compute == "bfloat16"
        self.model = self._build(device)
        if dist.get_world_size() > 1:
            self._shard()
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter_name, parameter in self.model.named_parameters():
            free = any(fnmatchcase(parameter_name, glob) for glob in config.optimizer.no_decay)
            (others if free else decayed).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.optimizer.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )

    def _build(self, device: torch.device) -> nn.Module:
        model = build_meta_model(self.config)
        model.to_empty(device=device)
        shards = [Shard.whole(name, parameter) for name, parameter in model.named_parameters()]
        initialize(shards, model.initial_values(), self.config.run.seed)
        model.reset_buffers(DTYPES[self.config.precision.storage])
        return model

    def layers(self) -> list[nn.Module]:
        """Return the blocks of the model."""
        return list(self.model.layers.values())  # type: ignore[operator, union-attr]

    def _shard(self) -> None:
        narrow = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self._narrow else MixedPrecisionPolicy()
        )
        for layer in self.layers():
            fully_shard(layer, mp_policy=narrow)
        fully_shard(self.model, mp_policy=narrow)

    def step(self) -> None:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        tokens = (batch.labels != IGNORE).sum()  # equal on all processes: fully_shard averages gradients
        total = torch.zeros((), device=batch.tokens.device)
        for micro in batch.microbatches(self.config.train.micro_batch_size):
            with torch.autocast(tokens.device.type, torch.bfloat16, self._narrow):
                loss = self._loss(micro)
            (loss / tokens).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.grad_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(total / tokens)

    def _loss(self, micro: Batch) -> Tensor:
        """Return the cross-entropy summed over the tokens of a microbatch."""
        return _cross_entropy(self.model(micro.tokens), micro.labels)

    def losses(self) -> list[float]:
        return torch.stack(self._losses).tolist() if self._losses else []

    def close(self) -> None:
        self._batches = []


class LlamaLoop(BareLoop):
    """transformers' Llama with the sizes of forge's model, in BareLoop's loop, with attention "sdpa" and PyTorch's loss."""

    def _build(self, device: torch.device) -> nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        model = self.config.model
        torch.manual_seed(self.config.run.seed)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(
                LlamaConfig(
                    hidden_size=model.dim,
                    num_hidden_layers=model.n_layers,
                    num_attention_heads=model.n_heads,
                    num_key_value_heads=model.n_kv_heads,
                    head_dim=model.head_dim,
                    intermediate_size=model.ffn_dim,
                    vocab_size=model.vocab_size,
                    rms_norm_eps=model.norm_eps,
                    tie_word_embeddings=model.tie_embeddings,
                    max_position_embeddings=self.config.train.seq_len,
                    use_cache=False,
                ),
                attn_implementation="sdpa",
                dtype=DTYPES[self.config.precision.storage],
            )

    def layers(self) -> list[nn.Module]:
        return list(self.model.model.layers)  # type: ignore[union-attr, arg-type]

    def _loss(self, micro: Batch) -> Tensor:
        return _cross_entropy(self.model(input_ids=micro.tokens).logits, micro.labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def why_no_bfloat16(device: torch.device) -> str | None:
    """Return the reason if bfloat16 is slow on `device` (minutes per step), otherwise None."""
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return (
        "this CPU has no instructions for bfloat16 (avx512), without which PyTorch multiplies by plain loops"
    )


def why_no_llama() -> str | None:
    """Return the reason if transformers' Llama cannot take part, otherwise None."""
    return None if find_spec("transformers") else "transformers is not installed"


def make_batches(config: Config, count: int, device: torch.device) -> list[Batch]:
    """Return this rank's part of the first `count` batches of forge's loader, on the device."""
    loader = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        device=device,
    )
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()


def compare(
    make: Callable[[Path], list[Contender]], given: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Measure the contenders of `make(folder)` in turns; return a row of JSON values for each. Collective.

    A row has the seconds per step of each round, the losses, the tokens per step, and the seconds that a step would take at
    the device's peak FLOP/s (None if the peak is unknown). Raises UserError if a contender's loss does not fall.
    """
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        contenders = make(Path(folder[0]))
        seconds = take_turns(
            contenders, rounds=given.rounds, steps=given.steps, warmup=given.warmup, device=device
        )
        losses = {contender.name: contender.losses() for contender in contenders}
        for contender in contenders:
            contender.close()
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
    rows = []
    for contender in contenders:
        name = contender.name
        if dist.get_rank() == 0:
            require_learning(name, losses[name])
        config: Config = contender.config  # type: ignore[attr-defined]
        peak, tokens = known_peak(config, device), config.train.global_batch_size * config.train.seq_len
        flops = flops_per_token(build_meta_model(config), config.train.seq_len) * tokens
        rows.append(
            {
                "name": name,
                "seconds": seconds[name],
                "losses": losses[name],
                "tokens": tokens,
                "seconds_at_peak": flops / dist.get_world_size() / peak if peak else None,
            }
        )
    return rows


def known_peak(config: Config, device: torch.device) -> float | None:
    """Return the GPU's peak FLOP/s in the format of this config's matrix products, e.g. float8. None if unknown."""
    float8: Any = config.precision.float8 != "none"
    return peak_flops(device, "float8" if float8 else config.precision.compute)
