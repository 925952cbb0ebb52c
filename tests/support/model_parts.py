"""Parts of models for the equivalence tests: the keys of [model] and [model.moe] to enable each part."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.equivalence import tiny_config

# name -> (keys of [model], keys of [model.moe]). Any key of [model.moe] makes the model a mixture of experts.
PARTS: dict[str, tuple[str, str]] = {
    "residuals": ('residual = "attention"\nresidual_block_size = 2', ""),
    "post": ('norm_position = "post"', ""),
    "sandwich": ('norm_position = "sandwich"', ""),
    "zero-centered": ("zero_centered_norms = true", ""),
    "gelu": ('activation = "gelu_tanh"', ""),
    "relu2": ('activation = "relu2"', ""),
    "situ": ('activation = "situ"\nactivation_limit = 0.5\nactivation_up_limit = 2.0', ""),
    "clamped": ('activation = "clamped_swiglu"\nactivation_limit = 0.5', ""),
    "biases": ("ffn_bias = true\nattention_bias = true\nattention_output_bias = true", ""),
    "scaled": ("scale_embeddings = true\ntie_embeddings = true", ""),
    "norm of heads": ("qk_norm = true", ""),
    "norm over heads": ('qk_norm = true\nqk_norm_over = "projection"', ""),
    "ahead": ("mtp = { depth = 2, loss_coef = 0.5 }", ""),
    "expert biases": ("", "expert_bias = true\nrouter_bias = true\nn_shared_experts = 1"),
    "gated shared expert": ("", "n_shared_experts = 2\nshared_expert_gate = true"),
    "latent experts": ("", "latent_dim = 20\nn_shared_experts = 2"),
    "some layers": ("", "every = 2\nbalance = 'aux_loss'\naux_loss_coef = 0.3"),
}
MIXTURE = "[model.moe]\nn_experts = 8\ntop_k = 2\nexpert_dim = 24\nbias_update_rate = 0.05\n"


def together(names: Iterable[str]) -> bool:
    """Return whether these parts set disjoint keys."""
    keys = [line.partition(" =")[0] for name in names for text in PARTS[name] for line in text.splitlines()]
    return len(keys) == len(set(keys))


def parts_text(
    names: Iterable[str], parallel: str = "", micro: int = 1, layers: int = 3, more: str = ""
) -> str:
    """Return the configuration of a tiny model with these parts."""
    names = list(names)
    model = "\n".join(["n_kv_heads = 4", *(PARTS[name][0] for name in names)])
    if any(PARTS[name][1] for name in names):
        model += "\n" + MIXTURE + "\n".join(PARTS[name][1] for name in names)
    text = tiny_config(model=model + "\n", parallel=parallel, micro=micro).replace("n_kv_heads = 2\n", "")
    return text.replace("n_layers = 3", f"n_layers = {layers}") + more
