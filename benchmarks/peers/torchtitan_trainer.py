"""torchtitan's trainer, with its model, data-parallel sharding, loss, clipping, optimizer and schedule, on a CPU.

torchtitan requires a GPU. Numbered comments mark the seven parts replaced in this file. Only the sixth changes the
arithmetic: experts compute in the configured precision.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.peers.task import Curve, Task

# 1. The device: without a GPU torchtitan assumes CUDA.
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


class NoMemory:
    """2. Memory statistics, which torch.cpu does not have."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


class Batches(BaseDataLoader):
    """A data loader with this rank's rows of the task's batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        folder: str

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any):
        tokens, labels = Task.load(Path(config.folder)).rows_of(dp_rank, dp_world_size)
        self._batches = list(zip(tokens, labels, strict=True))

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return iter(({"input": tokens}, labels) for tokens, labels in self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """3. The tokenizer: batches already are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def specify(weights: Path, seq_len: int) -> ModelSpec:
    """Return torchtitan's Llama 3 or Qwen3 mixture of experts, with the sizes in config.json of `weights`."""
    keys = json.loads((weights / "config.json").read_text())
    rope = {"dim": keys["head_dim"], "max_seq_len": seq_len, "theta": keys["rope_theta"]}
    shape = {
        "n_layers": keys["num_hidden_layers"],
        "dim": keys["hidden_size"],
        "n_heads": keys["num_attention_heads"],
        "n_kv_heads": keys["num_key_value_heads"],
        "attn_backend": "flex",
    }
    if keys["model_type"] == "llama":
        spec = llama3.model_registry("debugmodel")
        layers = llama3._build_llama3_layers(
            **shape, hidden_dim=keys["intermediate_size"], rope=ComplexRoPE.Config(**rope)
        )
    else:
        spec = qwen3.model_registry("debugmodel_moe")
        layers = qwen3._build_qwen3_moe_layers(
            **shape,
            head_dim=keys["head_dim"],
            moe_hidden_dim=keys["moe_intermediate_size"],
            num_experts=keys["num_experts"],
            top_k=keys["num_experts_per_tok"],
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(**rope),
        )
    model: Any = spec.model
    model.layers, model.enable_weight_tying = layers, keys["tie_word_embeddings"]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = keys["vocab_size"]
    model.dim = model.tok_embeddings.embedding_dim = keys["hidden_size"]
    model.lm_head.in_features = model.norm.normalized_shape = keys["hidden_size"]
    for _, norm, _, _ in model.traverse(RMSNorm.Config):
        norm.eps = keys["rms_norm_eps"]
    for layer in layers:
        # 4. The attention kernel: FlexAttention has no gradients on a CPU. This class of torchtitan wraps PyTorch's function.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
    return spec


def train(task: Task, rank: int, world: int) -> Curve:
    """Make all steps with torchtitan's Trainer, which joins the ranks. Return the curve on rank 0. Collective."""
    steps, batch, seq_len = task.tokens.shape
    spec: Any = specify(task.weights, seq_len)
    cross_entropy = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=str(task.folder / f"torchtitan-{world}"),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(folder=str(task.folder)),
        loss=ChunkedLossWrapper.Config(loss_fn=cross_entropy),
        optimizer=default_adamw(task.lr, betas=task.betas, eps=task.eps, weight_decay=task.weight_decay),
        # With an equal number of steps torchtitan's decay would begin a step later than forge's, and not reach its last
        # rate.
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=task.warmup,
            total_steps=steps - 1,
            decay_ratio=task.decay / (steps - 1),
            decay_type="cosine",
            min_lr_factor=task.min_lr_ratio,
        ),
        training=TrainingConfig(
            local_batch_size=batch // world,
            seq_len=seq_len,
            max_norm=task.max_norm,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        # Other back ends of torchtitan need a newer fully_shard than that of PyTorch 2.13.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=metrics.MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(
            enable=True, initial_load_path=str(task.weights.absolute()), initial_load_in_hf=True
        ),
        activation_checkpoint=None,
    )
    metrics.build_device_memory_monitor = NoMemory
    # 5. Shorter timeouts after the first step: their barrier takes the number of a GPU as argument.
    utils.set_pg_timeouts = lambda **_: None
    # 6. The experts' precision: torchtitan casts their inputs and weights to bfloat16 in every configuration.
    torch.Tensor.bfloat16 = lambda tensor: tensor
    trainer, curve = config.build(), Curve()
    # 7. The gradient sum: NCCL's scaled sum (factor 1), missing in gloo.
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)

    def log(step: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, float]) -> None:
        curve.append(loss, norm, extra_metrics["lr/AdamW"])

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    return curve
