"""Multi-token prediction modules of DeepSeek-V3 and GLM-4.5: transformers loads the export and computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forge.model.mtp import hidden_ahead
from forge.tools.hf import export_weights, import_weights
from tests.support.hf_models import fill, float32_means, loaded, our_config, our_model, their_model, tokens

DEPTH = 2


def with_modules(case: str, folder: Path) -> Path:
    """Write a folder as published: random tensors of `case`, and of modules after its layers."""
    import transformers
    from safetensors.torch import save_file
    from transformers.modeling_layers import MtpModel

    theirs = their_model(case, num_nextn_predict_layers=DEPTH)
    layers = theirs.config.num_hidden_layers
    theirs.save_pretrained(folder)
    modules = MtpModel(theirs, DEPTH)
    fill(modules)
    assert isinstance(theirs, transformers.PreTrainedModel)
    tensors = load_file(folder / "model.safetensors")
    names = {"mtp_block.": "", "post_norm": "shared_head.norm"}
    for name, values in modules.layers.state_dict().items():
        number, _, rest = name.partition(".")
        for theirs_name, published in names.items():
            rest = rest.replace(theirs_name, published) if rest.startswith(theirs_name) else rest
        place = f"model.layers.{layers + int(number)}"
        if ".experts." in rest:
            leaf = rest.rpartition(".")[2]
            for expert, weight in enumerate(values):
                if leaf == "down_proj":
                    tensors[f"{place}.mlp.experts.{expert}.down_proj.weight"] = weight.contiguous()
                else:
                    for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                        tensors[f"{place}.mlp.experts.{expert}.{part}.weight"] = half.contiguous()
        else:
            tensors[f"{place}.{rest}"] = values.contiguous()
    for number in range(layers, layers + DEPTH):
        tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.long
@pytest.mark.parametrize("case", ["deepseek_v3", "glm4_moe_quarter"])
def test_modules_are_read_and_written_and_predict_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    folder = with_modules(case, tmp_path / "theirs")
    import_weights(folder, tmp_path / "ours")
    mtp = our_config(tmp_path / "ours").model.mtp
    assert mtp is not None and mtp.depth == DEPTH
    export_weights(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []

    ours = our_model(tmp_path / "ours")
    back: Any = loaded(tmp_path / "back", "unexpected_keys")
    layers = back.config.num_hidden_layers
    # Transformers knows modules by the numbers of the published models' layers.
    behind = rf"model\.layers\.[{layers}-{layers + DEPTH - 1}].*"
    monkeypatch.setattr(back, "_keys_to_ignore_on_load_unexpected", [behind])
    modules = MtpModel.from_pretrained(back).eval()
    text = tokens(1, 16)
    count = text.shape[1] - DEPTH
    places = torch.arange(count)[None]
    with torch.no_grad(), float32_means(torch.float32):
        theirs = back.model(text[:, :count]).last_hidden_state
        found: list[torch.Tensor] = []
        monkeypatch.setattr(ours.loss, "forward", lambda x, *_: found.append(x) or x)
        ours(text[:, :count], text[:, :count])
        mine = found[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
        cache = MtpCache(config=back.config.get_mtp_config())
        for module in range(DEPTH):
            ahead = text[:, module + 1 : module + 1 + count]
            theirs = modules.forward_layer(module, theirs, places, cache, input_ids=ahead)
            mine = hidden_ahead(ours, module, mine, ahead, places)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def test_announced_but_missing_modules_are_left_out(tmp_path: Path) -> None:
    their_model("glm4_moe_quarter", num_nextn_predict_layers=1).save_pretrained(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    assert our_config(tmp_path / "ours").model.mtp is None


def test_modules_that_transformers_ignores_are_left_out(tmp_path: Path) -> None:
    """The published ERNIE 4.5 has a module, but no key in config.json that forge could read."""
    from safetensors.torch import save_file

    their_model("ernie4_5_moe").save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.mtp_emb_norm.0.weight": torch.ones(8)}, file, {"format": "pt"})
    import_weights(tmp_path / "in", tmp_path / "out")
    assert our_config(tmp_path / "out").model.mtp is None
