"""Kimi K3's folders: the published names and shapes, in import and export, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.checkpoint import Checkpoints, find_checkpoint, read_config
from forge.checkpoint.loading import TensorReader
from forge.config import load_config, parse_toml_text
from forge.config.model import ModelConfig
from forge.model import Transformer
from forge.runtime.distributed import single_process_group
from forge.runtime.errors import UserError
from forge.shard import Box, Shard
from forge.tools.hf import export_weights, import_weights
from forge.tools.hf.kimi import nested, unnested
from forge.tools.hf.model_config import read_model, write_model
from forge.tools.hf.table import BY_NAME
from tests.support.hf_models import fill

K3 = BY_NAME["KimiK3ForConditionalGeneration"]
DIM, HEADS, SIZE, LATENT, FFN, EXPERT, EXPERTS = 32, 4, 8, 16, 48, 24, 4
LINEAR, PERIOD = HEADS * SIZE, ["linear", "linear", "nope"]
TEXT = f"""
[model]
dim = {DIM}
n_layers = 3
n_heads = {HEADS}
ffn_dim = {FFN}
vocab_size = 67
residual = "attention"
residual_block_size = 2
activation = "situ"
activation_limit = 4.0
attention = "mla"
attention_gate = "element"
layer_pattern = {json.dumps(PERIOD)}
[model.mla]
q_lora_rank = 12
kv_lora_rank = 10
qk_nope_head_dim = 8
qk_rope_head_dim = 6
v_head_dim = 7
[model.linear_attention]
kind = "kimi_delta"
n_key_heads = {HEADS}
key_head_dim = {SIZE}
full_rank_gate = true
decay_bound = 5.0
[model.moe]
n_experts = {EXPERTS}
top_k = 2
n_shared_experts = 2
expert_dim = {EXPERT}
latent_dim = {LATENT}
n_dense_layers = 1
score_function = "sigmoid"
balance = "quantile"
[data]
sources = [{{ path = "synthetic" }}]
[train]
steps = 1
seq_len = 64
global_batch_size = 8
"""
# The text_config of moonshotai/Kimi-K3 at f831ab66, without keys that do not describe the model.
PUBLISHED: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 3072,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 96,
    "num_expert_group": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def published_names() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder in bfloat16, written out from the published ones."""
    found: dict[str, tuple[int, ...]] = {
        "lm_head": (67, DIM),
        "model.embed_tokens": (67, DIM),
        "model.norm": (DIM,),
        "model.output_attn_res_norm": (DIM,),
        "model.output_attn_res_proj": (1, DIM),
    }
    for n, kind in enumerate(PERIOD):
        layer = f"model.layers.{n}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}"] = (DIM,)
        for name in ("self_attention_res", "mlp_res"):
            found |= {f"{layer}.{name}_norm": (DIM,), f"{layer}.{name}_proj": (1, DIM)}
        if kind == "linear":
            own: dict[str, tuple[int, ...]] = {f"{name}_proj": (LINEAR, DIM) for name in "qkvg"}
            own |= {f"{name}_conv1d": (LINEAR, 1, 4) for name in "qkv"}
            own |= {"f_a_proj": (SIZE, DIM), "f_b_proj": (LINEAR, SIZE), "b_proj": (HEADS, DIM)}
            own |= {"o_norm": (SIZE,), "o_proj": (DIM, LINEAR), "A_log": (SIZE,), "dt_bias": (LINEAR,)}
        else:
            own = {"q_a_proj": (12, DIM), "q_a_layernorm": (12,), "q_b_proj": (HEADS * 14, 12)}
            own |= {"kv_a_proj_with_mqa": (16, DIM), "kv_a_layernorm": (10,), "kv_b_proj": (HEADS * 15, 10)}
            own |= {"o_proj": (DIM, HEADS * 7), "g_proj": (HEADS * 7, DIM)}
        found |= {f"{layer}.self_attn.{name}": shape for name, shape in own.items()}
        of_ffn = {
            "gate_proj": (FFN, DIM),
            "up_proj": (FFN, DIM),
            "down_proj": (DIM, FFN),
        }  # and of two shared experts
        module = f"{layer}.block_sparse_moe"
        ffn = f"{layer}.mlp" if n == 0 else f"{module}.shared_experts"
        found |= {f"{ffn}.{name}": shape for name, shape in of_ffn.items()}
        if n == 0:
            continue
        found |= {f"{module}.gate": (EXPERTS, DIM), f"{module}.routed_expert_norm": (LATENT,)}
        found |= {
            f"{module}.routed_expert_down_proj": (LATENT, DIM),
            f"{module}.routed_expert_up_proj": (DIM, LATENT),
        }
        found[f"{module}.gate.e_score_correction_bias"] = (EXPERTS,)
        for expert in range(EXPERTS):
            of_expert = {"w1": (EXPERT, LATENT), "w2": (LATENT, EXPERT), "w3": (EXPERT, LATENT)}
            found |= {f"{module}.experts.{expert}.{name}": shape for name, shape in of_expert.items()}
    bare = ("A_log", "dt_bias", "e_score_correction_bias")
    return {
        f"language_model.{name}{'' if name.endswith(bare) else '.weight'}": shape
        for name, shape in found.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: a checkpoint with random weights; `out`: the folder made of it."""
    root = tmp_path_factory.mktemp("kimi")
    config = parse_toml_text(TEXT)
    model = Transformer(config.model, config.train.seq_len)
    with torch.no_grad():
        fill(model)
    named = {
        f"model.{name}": (Shard(name, v.shape, (Box((0,) * v.ndim, tuple(v.shape)),), v), v)
        for name, v in model.state_dict().items()
    }
    with single_process_group():
        checkpoints = Checkpoints(root / "run" / "checkpoints", mode="sync")
        (outcome,) = checkpoints.save(1, named, {}, {"config.toml": TEXT.encode()}, {})
    assert outcome.error is None
    assert export_weights(find_checkpoint(root / "run"), root / "out").architecture == K3.name
    return root


def changed(folder: Path, to: Path, tensors: dict[str, Tensor] | None = None, **text: Any) -> Path:
    """Write `folder` again with other tensors and keys of text_config; return the new folder."""
    to.mkdir()
    values = json.loads((folder / "config.json").read_text())
    values["text_config"] |= text
    (to / "config.json").write_text(json.dumps(values))
    save_file(load_file(folder / "model.safetensors") | (tensors or {}), to / "model.safetensors")
    return to


def test_a_folder_has_the_published_names_and_shapes(folder: Path) -> None:
    written = {name: tuple(v.shape) for name, v in load_file(folder / "out" / "model.safetensors").items()}
    assert written == published_names()


@pytest.mark.long
def test_what_was_written_is_read_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    import_weights(folder / "out", tmp_path / "back")
    before, after = TensorReader(find_checkpoint(folder / "run")), TensorReader(tmp_path / "back")
    names = [name for name in before.tensors() if not name.endswith("previous_counts")]
    assert names
    for name in names:
        assert torch.equal(before.read(name), after.read(name)), name
    back = parse_toml_text(read_config(tmp_path / "back")).model
    own = parse_toml_text(TEXT).model
    assert back == own.model_copy(update={"moe": own.moe.model_copy(update={"balance": "bias"})})  # type: ignore[union-attr]


def test_the_gain_of_a_norm_on_keys_is_part_of_the_query_and_padding_is_left_out(
    folder: Path, tmp_path: Path
) -> None:
    old = load_file(folder / "out" / "model.safetensors")
    gain = torch.linspace(0.5, 1.5, DIM)
    norms = {name: gain.clone() for name in old if "_res_norm" in name}
    padded = {name: values.clone() for name, values in old.items() if name.endswith("A_log")}
    for values in padded.values():
        values[HEADS:] = 7.0
    source = changed(folder / "out", tmp_path / "changed", norms | padded | {"vision_tower.x": torch.ones(1)})
    import_weights(source, tmp_path / "back")
    before, after = TensorReader(find_checkpoint(folder / "run")), TensorReader(tmp_path / "back")
    for name in before.tensors():
        if name.endswith(".query"):
            assert torch.equal(after.read(name), before.read(name) * gain), name
        elif name.endswith("a_log"):
            assert torch.equal(after.read(name), before.read(name))


def test_queries_read_from_bfloat16_are_not_rounded(folder: Path, tmp_path: Path) -> None:
    old = load_file(folder / "out" / "model.safetensors")
    gain = torch.linspace(0.5, 1.5, DIM)
    half = {name: (gain if "_res_norm" in name else values).bfloat16() for name, values in old.items()}
    import_weights(changed(folder / "out", tmp_path / "half", half), tmp_path / "back")
    after = TensorReader(tmp_path / "back")
    projection = half["language_model.model.output_attn_res_proj.weight"].float().flatten()
    assert torch.equal(after.read("model.mix.query"), projection * gain.bfloat16().float())
    assert after.read("model.norm.weight").dtype == torch.bfloat16


def test_the_published_config_is_the_preset() -> None:
    values = {
        "architectures": [K3.name],
        "model_type": "kimi_k3",
        "text_config": PUBLISHED,
        "vision_config": {},
    }
    read = read_model(unnested(values), K3)
    model = load_config(["--config", "kimi-k3"]).model
    moe = model.moe
    assert moe is not None
    assert ModelConfig.model_validate(read) == model.model_copy(
        # No layer rotates.
        update={"moe": moe.model_copy(update={"balance": "bias"}), "rope_theta": 10000.0}
    )
    written = nested(write_model(model, K3, 1048576))["text_config"]
    assert {key: written[key] for key in PUBLISHED if key in written} == {
        key: value for key, value in PUBLISHED.items() if key in written
    }
    assert set(PUBLISHED) - set(written) == {"num_nextn_predict_layers", "use_grouped_topk"}


PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            {"quantization_config": PACKED},
            "packed by compressed-tensors (format 'mxfp4-pack-quantized') cannot be read",
        ),
        ({"mla_use_nope": False}, "mla_use_nope = False: forge supports only True"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu': forge supports only 'situ'"),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "head_dim": 8, "num_heads": 4}},
            "name each layer from 1 to 3 once",
        ),
    ],
)
def test_what_forge_does_not_compute_is_refused(
    folder: Path, tmp_path: Path, text: dict[str, Any], said: str
) -> None:
    source = changed(folder / "out", tmp_path / "changed", None, **text)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        import_weights(source, tmp_path / "back")
    assert said in str(caught.value) and not (tmp_path / "back").exists()
