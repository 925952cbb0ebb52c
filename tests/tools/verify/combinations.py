"""The table of planted defects in combinations of two features; columns as in `Defect`."""

from __future__ import annotations

from tests.support import combined_defects as combined
from tests.tools.verify.algorithms import HERE as ALGORITHMS
from tests.tools.verify.defects import FULL, MOE, Defect, config

MUON = 'name = "muon"'
LINEAR = (
    'layer_pattern = ["linear", "full"]\n[model.linear_attention]\n'
    "n_key_heads = 2\nn_value_heads = 4\nkey_head_dim = 8\n"
)
MLA = (
    'attention = "mla"\n[model.mla]\nq_lora_rank = 16\nkv_lora_rank = 16\nqk_nope_head_dim = 8\nqk_rope_head_dim = 4\n'
    "v_head_dim = 8\n"
)

# `config` writes keys of [model] first, then tables.
K3 = (
    'residual = "attention"\nresidual_block_size = 2\nlayer_pattern = ["linear", "linear", "linear", "nope"]\n'
    f"{MLA}[model.linear_attention]\nkind = 'kimi_delta'\nn_key_heads = 4\nkey_head_dim = 8\nfull_rank_gate = true\n"
    f"decay_bound = 5.0\n{MOE}latent_dim = 16\nbalance = 'quantile'\nscore_function = 'sigmoid'\n"
)

CONFIGS = {
    "k3": config(K3).replace("n_layers = 2", "n_layers = 4"),
    "ahead": config("[model.mtp]\ndepth = 1\n"),
    "shared": config(f"{MOE}n_shared_experts = 1\n"),
    "latent": config(MLA),
    "head norms": config("qk_norm = true"),
    "expert biases": config(f"{MOE}expert_bias = true\n"),
    "sequence loss": config(f'{MOE}balance = "sequence_aux_loss"\naux_loss_coef = 0.3'),
    "sinks": config("attention_sinks = true"),
    "shared keys": config().replace("n_kv_heads = 4", "n_kv_heads = 2"),
    "window": config("sliding_window = 24"),
    "linear": config(LINEAR),
    "looped": config(f'kind = "{ALGORITHMS}:Looped"'),
    "normuon": config(optimizer=f'{MUON}\n[optimizer.muon]\nsecond_moment = "neuron"'),
    "muonclip": config(optimizer=f"{MUON}\n[optimizer.muon]\nqk_clip = 0.01"),
    "heads": config(optimizer=f"{MUON}\n[optimizer.muon]\nsplit_heads = true"),
    "muon": config(optimizer=MUON),
    "ema": config(optimizer="ema = 0.9"),
    "int8": config(optimizer='moment_dtype = "int8"'),
    "bfloat16": config(optimizer='moment_dtype = "bfloat16"'),
    "mup": config(optimizer='parametrization = "mup"\nmup.base_dim = 8'),
}

ZERO1, ZERO2 = (f"dp_shard=2 data_parallel={engine}" for engine in ("zero1", "zero2"))
ATTENTION = r"layers\.0\.attention"
ROUTER = r"layers\.1\.feed_forward\.router\.weight"


COMBINATIONS = [
    Defect(
        combined.look_ahead_within_the_part, "ahead", "cp=2", "input", r"embedding \(call 2\)", "MTP, cp"
    ),
    Defect(
        combined.shared_experts_on_every_rank, "shared", "tp=2", "output", r"layers\.0\.feed_forward", "shared experts, tp"
    ),
    Defect(
        combined.latent_norms_left_apart, "latent", "tp=2", "gradient", r"layers\.1\.attention\.kv_norm\.weight", "MLA, tp"
    ),
    Defect(
        combined.head_norms_left_apart, "head norms", "tp=2", "gradient", r"layers\.1\.attention\.[qk]_norm\.weight",
        "QK norm, tp",
    ),
    Defect(combined.routers_left_apart, "experts", "tp=2", "gradient", ROUTER, "experts, tp"),
    Defect(
        combined.expert_inputs_left_apart, "experts", "tp=2 sequence_parallel=false", "gradient",
        r"layers\.1\.ffn_norm\.weight", "experts, tp without sequence parallelism",
    ),
    Defect(
        combined.expert_biases_on_every_rank, "expert biases", "tp=2", "gradient",
        r"layers\.1\.feed_forward\.experts\.w2_bias", "expert biases, tp",
    ),
    Defect(combined.routers_balanced_without_tp, "experts", "tp=2", "router", r"layers\.0", "balancing, tp"),
    Defect(
        combined.sequence_loss_of_own_tokens, "sequence loss", "cp=2", "gradient", ROUTER, "balancing loss, cp"
    ),
    Defect(
        combined.last_row_dropped, "experts", "dp_shard=2 ep=2", "output", r"layers\.0\.feed_forward", "experts, ep"
    ),
    Defect(combined.sinks_counted_twice, "sinks", "tp=2", "norm", "norm", "sinks, tp"),
    Defect(
        combined.flat_slices_without_decay, "dense", ZERO1, "parameter", r"layers\.0\.attention\.w\w\.weight",
        "weight decay, zero1",
    ),
    Defect(
        combined.norm_of_the_batch, "normuon", "dp_shard=2", "parameter", r"layers\.0\.attention\.w\w\.weight",
        "NorMuon, fsdp2",
    ),
    Defect(
        combined.own_largest_logits, "muonclip", "dp_shard=2", "parameter", r"layers\.0\.attention\.w[qk]\.weight",
        "QK-clip, fsdp2",
    ),
    Defect(
        combined.heads_by_own_rows, "heads", "tp=2", "parameter", r"layers\.0\.attention\.w[qkv]\.weight",
        "Muon by heads, tp",
    ),
    Defect(
        combined.own_part_of_matrices, "muon", ZERO1, "parameter", r"layers\.1\.feed_forward\.w2\.weight", "Muon, zero1"
    ),
    Defect(combined.states_pass_documents, "linear", "cp=2", "output", rf"{ATTENTION}\.conv", "linear attention, cp"),
    Defect(
        combined.second_use_without_gradient, "looped", ZERO2, "gradient", r"layers\.1\..*", "looped model, zero2"
    ),
    Defect(combined.mean_before_the_step, "ema", ZERO1, "optimizer", r"ema of .*", "EMA, zero1"),
    Defect(
        combined.experts_not_clipped, "experts", "dp_shard=2 ep=2", "optimizer",
        r"exp_avg of layers\.0\.feed_forward\.experts\.w\w+", "clipping, ep",
    ),
    Defect(
        combined.keys_in_another_order, "shared keys", "cp=4 context=ulysses", "output", ATTENTION,
        "grouped keys, ulysses",
    ),
    Defect(
        combined.windows_taken_as_whole, "window", "cp=2 context=ring", "output", ATTENTION, "sliding window, ring"
    ),
    Defect(
        combined.sinks_of_the_first_rank, "sinks", "cp=2 context=ulysses", "output", ATTENTION, "sinks, ulysses"
    ),
    Defect(combined.own_scales, "int8", "tp=2", "optimizer", r"exp_avg\w* of .*", "int8 moments, tp"),
    Defect(
        combined.noise_by_local_index, "bfloat16", "dp_shard=2", "optimizer", r"exp_avg\w* of .*", "bfloat16 moments, fsdp2"
    ),
    Defect(combined.counted_in_recomputation, "experts", FULL, "router", r"layers\.0", "experts, recomputation"),
    Defect(
        combined.loss_scale_by_microbatches, "balancing loss", "pp=2", "gradient", ROUTER, "balancing loss, pp"
    ),
    Defect(
        combined.held_out_tokens_of_own_part, "dense", "cp=2", "held-out", "held-out loss", "held-out loss, cp"
    ),
    Defect(combined.generated_from_0, "dense", "cp=2", "generation", "generation", "generation, cp"),
    Defect(
        combined.mix_queries_left_apart, "k3", "tp=2", "gradient", r"mix\.query", "attention residuals, tp"
    ),
    Defect(
        combined.saved_streams_detached, "k3", "pp=2", "gradient", r"embedding\.weight", "attention residuals, pp"
    ),
    Defect(
        combined.residual_blocks_of_the_stage, "k3", "pp=2", "output", r"layers\.2", "residual blocks, pp"
    ),
    Defect(
        combined.latents_of_experts_left_apart, "k3", "tp=2", "gradient",
        r"layers\.3\.feed_forward\.(from_latent|latent_norm|to_latent)\.weight", "latent experts, tp",
    ),
    Defect(combined.quantiles_of_own_tokens, "k3", "dp_shard=2", "router", r"layers\.0", "quantile balancing, fsdp2"),
    Defect(
        combined.quantiles_of_the_last_microbatch, "k3", "pp=2", "router", r"layers\.0",
        "quantile balancing, microbatches",
    ),
    Defect(
        combined.decays_without_bound, "k3", "tp=2", "output", r"layers\.0\.attention\.decay", "bounded decays, tp"
    ),
    Defect(
        combined.positions_in_position_free_latents, "k3", "cp=2", "output", r"layers\.3\.attention",
        "NoPE latent attention, cp",
    ),
    Defect(
        combined.rates_left_behind, "mup", ZERO1, "parameter", r".*", "mup, zero1"
    ),
]  # fmt: skip
