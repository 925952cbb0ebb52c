"""Training from imported weights and from another run's, and the way out of a run: one new history, the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forge.config import parse_toml_text
from forge.data.build import build_dataset
from forge.data.loader import Loader
from forge.tools.hf import import_weights
from tests.support.hf_models import SHAPE, loaded, our_model, their_model
from tests.support.runs import Run

# The shape of the imported models, on the data of all end-to-end tests.
OPTIONS = [
    "--model.dim=32",
    "--model.n_layers=3",
    "--model.ffn_dim=48",
    f"--model.vocab_size={SHAPE['vocab_size']}",
    "--model.norm_eps=1e-6",
    "--model.rope_theta=10000.0",
    "--train.steps=3",
    "--schedule.warmup_steps=2",
    "--checkpoint.interval=0",
]
CASES = {
    "llama2": ["--model.n_kv_heads=4"],
    "mixtral": [
        "--model.sliding_window=7",
        "--model.rope_theta=1000000.0",
        "--model.norm_eps=1e-5",
        "--model.moe.n_experts=4",
        "--model.moe.balance=bias",
    ],
}


def first_loss(model, config_text: str) -> float:
    """Return the mean cross-entropy of the transformers model `model` on the first batch of a run."""
    config = parse_toml_text(config_text)
    device = torch.device("cpu")
    size = config.train.global_batch_size
    batches = Loader(
        build_dataset(config),
        global_batch_size=size,
        rank=0,
        ranks=1,
        start_sample=0,
        device=device,
        prefetch=1,
    )
    batch = next(batches)
    batches.close()
    with torch.no_grad():
        logits = model(batch.tokens).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()


@pytest.mark.parametrize("case", CASES)
def test_a_run_begins_with_imported_weights_and_nothing_else(case: str, tmp_path: Path) -> None:
    theirs = their_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "imported")
    run = Run(tmp_path / "with", *OPTIONS, *CASES[case], f"--checkpoint.init={tmp_path / 'imported'}")
    assert run() == 0, run.output()
    fresh = Run(tmp_path / "without", *OPTIONS, *CASES[case])
    assert fresh() == 0, fresh.output()
    expected = first_loss(theirs, (run.path / "config.toml").read_text())
    assert run.losses()[0] == pytest.approx(expected, abs=1e-5)
    assert abs(fresh.losses()[0] - expected) > 0.1
    for key in ("step", "lr", "tokens"):
        assert [line[key] for line in run.metrics()] == [line[key] for line in fresh.metrics()]
    assert run.losses()[2] < run.losses()[0]
    states = [
        json.loads((each.path / "checkpoints/step-00000003/trainer.json").read_text())
        for each in (run, fresh)
    ]
    assert states[0]["optimizer"] == states[1]["optimizer"]
    for key in ("step", "next_sample", "tokens"):
        assert states[0]["progress"][key] == states[1]["progress"][key]


def test_a_run_begins_with_the_weights_of_another_run(tmp_path: Path) -> None:
    first = Run(tmp_path / "first", *OPTIONS)
    assert first() == 0
    origin = first.path / "checkpoints/step-00000003"
    lr = 1e-3
    plain = [
        f"--optimizer.lr={lr}",
        "--optimizer.weight_decay=0.0",
        "--schedule.warmup_steps=0",
        "--train.steps=1",
    ]
    second = Run(tmp_path / "second", *OPTIONS, f"--checkpoint.init={origin}", *plain)
    assert second() == 0, second.output()
    assert second.metrics()[0]["step"] == 1
    # The same first batch, with weights already trained on it.
    assert second.losses()[0] < first.losses()[0]
    # With fresh moments AdamW's first step is the learning rate, whatever the gradient; with the old ones it is not.
    after = our_model(second.path / "checkpoints/step-00000001").head.weight
    step = (after - our_model(origin).head.weight).detach().abs()
    assert step.max() < 1.001 * lr and step.median() > 0.99 * lr


def test_an_imported_folder_has_no_history_to_continue(tmp_path: Path) -> None:
    their_model("llama2").save_pretrained(tmp_path / "theirs")
    import_weights(tmp_path / "theirs", tmp_path / "imported")
    run = Run(tmp_path / "run", *OPTIONS, *CASES["llama2"], f"--checkpoint.resume={tmp_path / 'imported'}")
    assert run() == 2
    assert "checkpoint.resume" in run.output() and "checkpoint.init" in run.output()
    assert Run(tmp_path / "other", *OPTIONS, f"--checkpoint.init={tmp_path / 'theirs'}")() == 2


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_a_run_exported_writes_the_same_tokens(model: str, tmp_path: Path, capsys) -> None:
    """train.py, convert.py to-hf and generate.py against transformers, with the byte tokenizer."""
    from scripts.convert import main as convert
    from scripts.generate import main as generate

    mixture = [
        "--model.moe.n_experts=4",
        "--model.moe.score_function=sigmoid",
        "--model.moe.n_shared_experts=1",
    ]
    text = tmp_path / "text"
    _prepare(text)
    run = Run(
        tmp_path / "run",
        *OPTIONS,
        "--model.vocab_size=258",
        f'--data.sources=[{{path="{text}"}}]',
        "--data.tokenizer=bytes",
        "--train.steps=30",
        "--optimizer.lr=1e-2",
        *(mixture if model == "mixture" else []),
    )
    assert run() == 0, run.output()
    out = tmp_path / "out"
    assert convert(["to-hf", "--input", str(run.path), "--output", str(out)]) == 0
    capsys.readouterr()
    prompt = "the quick"
    asked = [
        "--checkpoint",
        str(run.path),
        "--prompt",
        prompt,
        "--max-tokens",
        "20",
        "--temperature",
        "0",
        "--json",
    ]
    assert generate(asked) == 0
    written = json.loads(capsys.readouterr().out)

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    assert tokens[0].tolist() == written["prompt_tokens"]
    new = loaded(out).generate(tokens, max_new_tokens=20, do_sample=False)[0, tokens.shape[1] :]
    assert len(set(new.tolist())) > 3
    assert new.tolist()[: len(written["tokens"])] == written["tokens"]
    # And back again: the imported checkpoint equals the exported one.
    assert convert(["from-hf", "--input", str(out), "--output", str(tmp_path / "back")]) == 0
    before = our_model(run.path / "checkpoints/step-00000030").state_dict()
    after = our_model(tmp_path / "back").state_dict()
    assert [n for n in before if n.endswith("previous_counts") or torch.equal(before[n], after[n])] == list(
        before
    )


def _prepare(folder: Path) -> None:
    from scripts.prepare_data import main as prepare

    source = folder.with_name("source")
    source.mkdir()
    (source / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    given = ["--input", str(source), "--tokenizer", "bytes", "--output", str(folder), "--workers", "1"]
    assert prepare(given) == 0
