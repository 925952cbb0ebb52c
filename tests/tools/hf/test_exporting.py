"""Export of models built in forge, on any layout: the class of transformers, and equal outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.checkpoint import Checkpoints, find_checkpoint
from forge.config import check_world, parse_toml_text, to_toml
from forge.model import Transformer
from forge.runtime.distributed import single_process_group
from forge.shard import Box, Shard
from forge.tools.hf import export_weights
from tests.support.harness import run_ranks
from tests.support.hf_models import fill, float32_means, loaded, tokens

TOLERANCE = 1e-9
BASE = """
[model]
dim = 32
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 67
{model}
[parallel]
{parallel}
[precision]
storage = "float64"
compute = "float64"
reduce = "float64"
[data]
sources = [{{ path = "synthetic" }}]
[train]
steps = 1
seq_len = 64
global_batch_size = 8
"""
ROPE = "[model.rope_scaling]\nfactor = 4.0\noriginal_max_position = 16\n"
MOE = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 16\n"
SANDWICH = 'norm_position = "sandwich"\nzero_centered_norms = true\nactivation = "gelu_tanh"\nscale_embeddings = true'
MODELS = {
    # All layers of a class with layers of both kinds have full attention.
    "gemma2_full": ("Gemma2ForCausalLM", f"{SANDWICH}\ntie_embeddings = true"),
    "gemma3_full": ("Gemma3ForCausalLM", f"{SANDWICH}\ntie_embeddings = true\nqk_norm = true"),
    "gpt_oss_full": (
        "GptOssForCausalLM",
        'attention_sinks = true\nactivation = "clamped_swiglu"\n'
        f'{MOE}expert_bias = true\nrouter_bias = true\nbalance = "none"',
    ),
    "plain": ("LlamaForCausalLM", ""),
    "tied": ("LlamaForCausalLM", "tie_embeddings = true"),
    "llama3": ("LlamaForCausalLM", f'{ROPE}kind = "llama3"'),
    "yarn": ("LlamaForCausalLM", f'{ROPE}kind = "yarn"\nattention_factor = 1.2'),
    "sliding": ("MistralForCausalLM", "sliding_window = 5"),
    "bias": ("Qwen2ForCausalLM", "attention_bias = true\nhead_dim = 12"),
    "bias_some_slide": (
        "Qwen2ForCausalLM",
        "attention_bias = true\nsliding_window = 5\nsliding_window_pattern = 2",
    ),
    "qk_norm": ("Qwen3ForCausalLM", "qk_norm = true\nhead_dim = 16"),
    "qk_norm_bias": ("Qwen3ForCausalLM", "qk_norm = true\nattention_bias = true\nsliding_window = 5"),
    "softmax": ("MixtralForCausalLM", f'sliding_window = 5\n{MOE}balance = "aux_loss"'),
    "one_expert": (
        "Qwen3MoeForCausalLM",
        f'qk_norm = true\n{MOE.replace("top_k = 2", "top_k = 1")}balance = "none"',
    ),
    "unnormalised": (
        "Qwen3MoeForCausalLM",
        f'qk_norm = true\n{MOE}balance = "sequence_aux_loss"\nnormalize_top_k = false\nn_dense_layers = 1',
    ),
    "default_routing": ("Ernie4_5_MoeForCausalLM", MOE),
    "default_routing_shared": ("Ernie4_5_MoeForCausalLM", f"{MOE}n_shared_experts = 2\nn_dense_layers = 1"),
    "deepseek_routing": (
        "Glm4MoeForCausalLM",
        f'{MOE}score_function = "sigmoid"\nn_shared_experts = 1\nroute_scale = 2.5\nn_expert_groups = 2\n'
        "n_limited_groups = 1",
    ),
    "deepseek_routing_qk_norm": (
        "Dots1ForCausalLM",
        f'qk_norm = true\nsliding_window = 5\n{MOE}score_function = "sigmoid"\nn_dense_layers = 1',
    ),
    "sigmoid_without_bias": ("Glm4MoeForCausalLM", f'{MOE}score_function = "sigmoid"\nbalance = "aux_loss"'),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_forge_computes_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    expected, model = MODELS[name]
    logits = _save_alone(BASE.format(model=model, parallel=""), tmp_path / "run")
    assert export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out").architecture == expected
    _assert_same(tmp_path / "out", logits)


LAYOUTS = {
    "fsdp_tp": (4, "dp_shard = 2\ntp = 2", "qk_norm = true\ntie_embeddings = true"),
    "fsdp_tp_ep": (
        4,
        "dp_shard = 2\ntp = 2\nep = 2",
        f'{MOE}score_function = "sigmoid"\nn_shared_experts = 1\nn_dense_layers = 1',
    ),
    "hsdp_ep": (4, "dp_replicate = 2\ndp_shard = 2\nep = 2", f'{MOE}balance = "none"'),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layout_has_saved_computes_the_same_in_transformers(layout: str, tmp_path: Path) -> None:
    world, parallel, model = LAYOUTS[layout]
    text = BASE.format(model=model, parallel=parallel)
    run_ranks(_save_on_rank, world, text, str(tmp_path / "run"))
    export_weights(find_checkpoint(tmp_path / "run"), tmp_path / "out")
    _assert_same(tmp_path / "out", _alone(text, tmp_path / "run"))


def _assert_same(folder: Path, logits: torch.Tensor) -> None:
    theirs = loaded(folder)
    assert theirs.dtype == torch.float64
    with float32_means(torch.float64), torch.no_grad():
        # Made again, for its table of rotary frequencies was float32.
        exact = type(theirs)._from_config(theirs.config, dtype=torch.float64)
        exact.load_state_dict(theirs.state_dict())
        difference = (exact(tokens()).logits - logits).abs().max().item()
    assert difference <= TOLERANCE, f"differs by {difference:.3e}"


def _model(text: str) -> Transformer:
    config = parse_toml_text(text)
    model = Transformer(config.model, config.train.seq_len).double()
    model.reset_buffers(torch.float64)
    return model


def _named(model: Transformer) -> dict[str, tuple[Shard, torch.Tensor]]:
    return {
        f"model.{name}": (Shard(name, v.shape, (Box((0,) * v.ndim, tuple(v.shape)),), v), v)
        for name, v in model.state_dict().items()
    }


@torch.no_grad()
def _save_alone(text: str, folder: Path) -> torch.Tensor:
    """Save a checkpoint with random weights from this process; return the model's output."""
    model = _model(text)
    fill(model)
    with single_process_group():
        checkpoints = Checkpoints(folder / "checkpoints", mode="sync")
        (outcome,) = checkpoints.save(1, _named(model), {}, {"config.toml": text.encode()}, {})
    assert outcome.error is None, outcome.error
    return model(tokens())


@torch.no_grad()
def _alone(text: str, folder: Path) -> torch.Tensor:
    """Load a checkpoint in this process; return the model's output."""
    model = _model(text)
    with single_process_group():
        checkpoints = Checkpoints(folder / "checkpoints", mode="sync")
        checkpoints.load(checkpoints.path(1), _named(model))
    return model(tokens())


def _save_on_rank(rank: int, world: int, text: str, folder: str) -> None:
    """Train one step under a layout, which moves weights and routers, and save the checkpoint."""
    from forge.data.build import build_dataset
    from forge.data.loader import Loader
    from forge.parallel.build import build_parallel_model
    from forge.parallel.mesh import make_meshes
    from forge.train.state import model_tensors

    config = parse_toml_text(text)
    meshes = make_meshes(check_world(config, world), "cpu")
    model = build_parallel_model(config, meshes, torch.device("cpu"))
    batches = Loader(
        build_dataset(config),
        global_batch_size=config.train.global_batch_size,
        rank=meshes.data_rank,
        ranks=meshes.data_ranks,
        start_sample=0,
        device=torch.device("cpu"),
        prefetch=1,
    )
    batch = next(batches)
    model.forward_backward(batch, model.count_tokens(batch))
    model.finalize_gradients()
    model.update_router(torch.tensor(0.0))
    for shard in model.shards:
        if shard.grad is not None:
            shard.data.add_(shard.grad, alpha=20.0)
    model.after_update()
    batches.close()
    checkpoints = Checkpoints(Path(folder) / "checkpoints", mode="sync")
    files = {"config.toml": to_toml(config).encode()}
    (outcome,) = checkpoints.save(1, model_tensors(model), {}, files, vars(meshes.degrees))
    assert outcome.error is None, outcome.error
