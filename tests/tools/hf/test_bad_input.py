"""Conversion refuses bad input in one sentence, exits with code 2 and leaves no files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config.model import ModelConfig
from forge.runtime.errors import UserError
from forge.tools.hf import import_weights
from forge.tools.hf.model_config import choose_architecture
from scripts.convert import main
from tests.support.hf_models import their_model
from tests.support.small_models import small_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` and `qwen3_moe`: folders of transformers. `imported`: the checkpoint of `llama`."""
    root = tmp_path_factory.mktemp("folders")
    for case, name in (("llama2", "llama"), ("qwen3_moe_plain", "qwen3_moe")):
        their_model(case).save_pretrained(root / name, max_shard_size="20KB")
    import_weights(root / "llama", root / "imported")
    return root


def refusal(
    direction: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int = 2
) -> str:
    """Return the one-line error of convert.py. Check the exit code and that no files are left."""
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([direction, "--input", str(source), "--output", str(tmp_path / "out")]) == code
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("forge: ")


def keys(**changes: Any) -> Callable[[Path], None]:
    """Changes config.json."""

    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def tensor(name: str, do: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Changes one tensor, or leaves it out."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        index = folder / "model.safetensors.index.json"
        places = json.loads(index.read_text())
        file = folder / places["weight_map"].get(name, next(iter(places["weight_map"].values())))
        tensors = load_file(file)
        new = do(tensors.pop(name, torch.zeros(())))
        if new is not None:
            tensors[name] = new.contiguous()
            places["weight_map"][name] = file.name
        else:
            del places["weight_map"][name]
        save_file(tensors, file, {"format": "pt"})
        index.write_text(json.dumps(places))

    return change


def files(do: Callable[[Path], None], pattern: str = "*00002*.safetensors") -> Callable[[Path], None]:
    return lambda folder: do(next(folder.glob(pattern)))


Q = "model.layers.1.self_attn.q_proj.weight"
ROPE = {"rope_theta": 10000.0, "factor": 2.0}
BAD: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "no_config": (
        "llama",
        lambda folder: (folder / "config.json").unlink(),
        ["config.json", "cannot be read"],
    ),
    "config_not_json": (
        "llama",
        lambda folder: (folder / "config.json").write_text("{"),
        ["config.json", "not a JSON object"],
    ),
    "config_nested_deeply": (
        "llama",
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        ["config.json", "nested too deeply"],
    ),
    "header_nested_deeply": (
        "llama",
        files(lambda file: file.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)),
        ["00002", "cut off, damaged or not in safetensors format"],
    ),
    "index_nested_deeply": (
        "llama",
        lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 100_000),
        ["index.json", "nested too deeply"],
    ),
    "more_layers_than_tensors": (
        "llama",
        keys(num_hidden_layers=10**9),
        ["config.json", "asks for 1000000000 layers, but the folder has only"],
    ),
    "unknown_architecture": (
        "llama",
        keys(architectures=["BertModel"]),
        ["BertModel", "LlamaForCausalLM", "Qwen3MoeForCausalLM"],
    ),
    "latent_attention": (
        "llama",
        keys(architectures=["DeepseekV2ForCausalLM"]),
        [
            "DeepseekV2ForCausalLM",
            "forge reads other models with latent attention, e.g. DeepseekV3ForCausalLM",
        ],
    ),
    "no_architecture": ("llama", keys(architectures=..., model_type="gpt2"), ["gpt2"]),
    "key_missing": ("llama", keys(hidden_size=...), ["config.json", "hidden_size"]),
    "key_of_another_type": ("llama", keys(hidden_size="wide"), ["model.dim", "wide"]),
    "no_number_of_layers": ("llama", keys(num_hidden_layers=None), ["config.json", "wrong type"]),
    "rope_scaling_as_text": ("llama", keys(rope_parameters="dynamic"), ["config.json", "wrong type"]),
    "activation": ("llama", keys(hidden_act="gelu"), ["hidden_act = 'gelu'", "'silu'"]),
    "bias_of_all_projections": ("llama", keys(attention_bias=True), ["attention_bias = True"]),
    "bias_of_mlp": ("llama", keys(mlp_bias=True), ["mlp_bias = True"]),
    "quantised": ("llama", keys(quantization_config={"bits": 4}), ["quantization_config"]),
    "rope_of_another_kind": (
        "llama",
        keys(rope_parameters=ROPE | {"rope_type": "dynamic"}),
        ["rope_parameters", "dynamic", "linear, llama3, yarn"],
    ),
    "rope_key_missing": (
        "llama",
        keys(rope_parameters=ROPE | {"rope_type": "llama3"}),
        ["rope_parameters", "lacks low_freq_factor"],
    ),
    "rope_of_part_of_a_head": (
        "llama",
        keys(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ["partial_rotary_factor = 0.5"],
    ),
    "heads_do_not_divide": ("llama", keys(num_key_value_heads=3), ["model.n_kv_heads"]),
    "dense_layers_between": (
        "qwen3_moe",
        keys(mlp_only_layers=[1]),
        ["mlp_only_layers = [1]", "experts in every n-th layer"],
    ),
    "one_normalised_expert": (
        "qwen3_moe",
        keys(norm_topk_prob=True, num_experts_per_tok=1),
        ["num_experts_per_tok = 1", "normalises"],
    ),
    "no_weights": (
        "llama",
        lambda folder: [file.unlink() for file in folder.glob("*safetensors*")],
        ["neither model.safetensors nor model.safetensors.index.json"],
    ),
    "pickled_weights": (
        "llama",
        lambda folder: [
            (folder / "model.safetensors.index.json").unlink(),
            (folder / "pytorch_model.bin").touch(),
        ],
        ["pickled weights"],
    ),
    "tensor_missing": ("llama", tensor(Q, lambda t: None), [f"{Q} is missing"]),
    "expert_missing": (
        "qwen3_moe",
        tensor("model.layers.2.mlp.experts.3.up_proj.weight", lambda t: None),
        ["model.layers.2.mlp.experts.3.up_proj.weight is missing"],
    ),
    "wrong_shape": ("llama", tensor(Q, lambda t: t[:-1]), [Q, "[31, 32]", "[32, 32]"]),
    "wrong_dtype": ("llama", tensor(Q, lambda t: t.to(torch.int8)), [Q, "I8", "BF16"]),
    "mixed_dtypes": (
        "qwen3_moe",
        tensor("model.layers.2.mlp.experts.3.up_proj.weight", lambda t: t.bfloat16()),
        ["model.layers.2.mlp.experts.0.gate_proj.weight", "BF16, F32"],
    ),
    "tensor_too_many": (
        "llama",
        tensor("model.layers.1.adapter.weight", lambda t: t),
        ["model.layers.1.adapter.weight is not a tensor of the model"],
    ),
    "file_missing": ("llama", files(Path.unlink), ["00002-of-", "cannot be read"]),
    "file_truncated": (
        "llama",
        files(lambda file: os.truncate(file, file.stat().st_size - 1)),
        ["00002-of-", "cut off"],
    ),
    "file_longer": ("llama", files(lambda file: os.truncate(file, file.stat().st_size + 1)), ["00002-of-"]),
    "file_empty": ("llama", files(lambda file: os.truncate(file, 0)), ["00002-of-", "cut off"]),
    "header_truncated": ("llama", files(lambda file: os.truncate(file, 30)), ["00002-of-", "cut off"]),
    "header_corrupt": (
        "llama",
        files(lambda file: _overwrite(file, 9, b"\xff\xff")),
        ["00002-of-", "cut off, damaged"],
    ),
    "index_corrupt": (
        "llama",
        files(lambda file: file.write_text("[]"), "*.index.json"),
        ["model.safetensors.index.json", "not an index"],
    ),
    "tokenizer_corrupt": (
        "llama",
        lambda folder: (folder / "tokenizer.model").write_bytes(b"no model"),
        ["tokenizer.model", "is not a SentencePiece model"],
    ),
    "tokenizer_truncated": (
        "llama",
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vo'),
        ["tokenizer.json", "is not a tokenizer.json"],
    ),
    "tokenizer_foreign": (
        "llama",
        lambda folder: (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 10**6}}, "added_tokens": []})
        ),
        ["tokenizer.json: has 1000001 tokens, but config.json has vocab_size = "],
    ),
}


def _overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(content)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_refused_by_name(what: str, folders: Path, tmp_path: Path, capsys) -> None:
    name, damage, words = BAD[what]
    folder = Path(shutil.copytree(folders / name, tmp_path / name))
    damage(folder)
    message = refusal("from-hf", folder, tmp_path, capsys)
    assert all(word in message for word in [*words, str(folder)]), message


@pytest.mark.parametrize("file", ["__0_3.distcp", ".metadata", "manifest.json", "config.toml"])
def test_a_damaged_checkpoint_is_refused_by_name(file: str, folders: Path, tmp_path: Path, capsys) -> None:
    folder = Path(shutil.copytree(folders / "imported", tmp_path / "imported"))
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    message = refusal("to-hf", folder, tmp_path, capsys, code=77)
    assert file in message and "is damaged" in message, message
    os.truncate(folder / file, 10)
    assert file in refusal("to-hf", folder, tmp_path, capsys, code=77)


def test_a_folder_without_a_checkpoint_or_run_is_refused(tmp_path: Path, capsys) -> None:
    assert "does not exist" in refusal("to-hf", tmp_path / "nowhere", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    assert "holds no complete checkpoint" in refusal("to-hf", tmp_path / "empty", tmp_path, capsys)


def test_what_is_there_is_not_overwritten(folders: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    for direction, name in (("to-hf", "imported"), ("from-hf", "llama")):
        assert "exists already" in refusal(direction, folders / name, tmp_path, capsys)


def test_an_existing_output_is_refused_before_the_checkpoint_is_verified(
    folders: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(folders / "imported", tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "config.toml", 10)
    (tmp_path / "out").touch()
    assert "exists already" in refusal("to-hf", tmp_path / "damaged", tmp_path, capsys)


def test_nothing_is_left_when_the_disk_is_full(folders: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    from forge.tools.hf import safetensors

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "_bytes_of", full)
    monkeypatch.setattr(safetensors.Stored, "read_into", full)
    for direction, name in (("to-hf", "imported"), ("from-hf", "llama")):
        given = [direction, "--input", str(folders / name), "--output", str(tmp_path / "out")]
        assert main(given) == 1
        assert "No space left" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


MOE = {"n_experts": 4, "expert_dim": 16}
NOT_IN_TRANSFORMERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "logit_soft_cap": ({"logit_soft_cap": 30.0}, ["LlamaForCausalLM", "model.logit_soft_cap = 30.0"]),
    "attention_soft_cap": ({"attention_soft_cap": 50.0}, ["model.attention_soft_cap = 50.0"]),
    "pattern_alone": (
        {"sliding_window": 4, "sliding_window_pattern": 2},
        ["MistralForCausalLM", "model.layer_pattern = ['sliding', 'full']"],
    ),
    "another_model": ({"kind": "mine:Model"}, ["model.kind = 'mine:Model'"]),
    "bias_with_softmax_and_qk_norm": (
        {"qk_norm": True, "moe": MOE},
        ["Qwen3MoeForCausalLM", "model.moe.balance = 'bias'"],
    ),
    "latent_attention_and_soft_caps": (
        {"mla": {}, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0, "moe": MOE | {"top_k": 2}},
        ["model.attention_soft_cap = 50.0", "model.logit_soft_cap = 30.0"],
    ),
    "one_choice_of_softmax": ({"moe": MOE | {"top_k": 1, "balance": "none"}}, ["model.moe.top_k = 1"]),
    "attention_residuals": (
        {"residual": "attention"},
        ["model.residual = 'attention' (it would become 'add')"],
    ),
    "latent_experts": (
        {"moe": MOE | {"latent_dim": 8, "balance": "none"}},
        ["model.moe.latent_dim = 8 (it would become 0)"],
    ),
    "scaled_softmax": (
        {"moe": MOE | {"balance": "none", "route_scale": 2.0}},
        ["MixtralForCausalLM", "model.moe.route_scale = 2.0"],
    ),
}


@pytest.mark.parametrize("what", NOT_IN_TRANSFORMERS)
def test_a_model_missing_in_transformers_is_refused_by_its_key(what: str) -> None:
    changes, words = NOT_IN_TRANSFORMERS[what]
    with pytest.raises(UserError) as caught:
        choose_architecture(small_config(**changes))
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), caught.value


def test_keys_for_training_only_prevent_no_export() -> None:
    free = {"router_noise": 0.1, "capacity_factor": 1.5, "z_loss_coef": 1e-3, "bias_update_rate": 0.1}
    model: ModelConfig = small_config(moe=MOE | free)
    assert choose_architecture(model).name == "Ernie4_5_MoeForCausalLM"
