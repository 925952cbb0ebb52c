"""generate.py, run like a user's command, on models of short runs."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from forge.runtime.errors import BAD_CONFIG, FINISHED, NO_CHECKPOINT
from scripts.generate import main
from tests.support.harness import start_ranks
from tests.support.runs import Run
from tests.support.trained import Result, call, objects, prepared, refusal, trained

MOE = [
    "--model.moe.n_experts=4",
    "--model.moe.top_k=2",
    "--model.moe.expert_dim=32",
    "--model.moe.n_shared_experts=1",
    "--model.moe.capacity_factor=1.0",
]
MODELS = {
    "dense": [],
    "windows": [
        "--model.sliding_window=4",
        "--model.sliding_window_pattern=2",
        "--model.tie_embeddings=true",
    ],
    "mixture of experts": MOE,
}
BEGIN, END = 256, 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    prepared(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder) -> Run:
    return trained(folder, "--checkpoint.interval=10", steps=30)


def generate(run: Run, *arguments: object) -> Result:
    return call(run.path.parent, "generate", "--checkpoint", run.path, *arguments)


def test_writes_the_learnt_text_and_ends_with_the_document(run) -> None:
    (found,) = objects(generate(run, "--prompt", "bcd", "--temperature", 0, "--json"))
    assert found["tokens"] == [*b"efgh", END]
    assert (found["text"], found["finish"]) == ("efgh", "end")
    assert found["prompt_tokens"] == [BEGIN, *b"bcd"]
    assert found["step"] == 30 and found["checkpoint"] == str(run.path / "checkpoints" / "step-00000030")


def test_shows_prompt_and_text_and_keeps_the_rest_for_stderr(run) -> None:
    result = generate(run, "--prompt", "bcd", "--temperature", 0)
    assert result.out == "bcdefgh\n" and re.search(r"5 tokens in .* tokens/s", result.err)
    assert generate(run, "--prompt", "bcd", "--prompt-ids", "256,100", "--temperature", 0).out == (
        "--- 1\nbcdefgh\n--- 2\ndefgh\n"
    )


def _on_an_ascii_terminal(rank: int, world: int, arguments: list[str], out: Path) -> None:
    with open(out, "w", encoding="ascii") as sys.stdout:
        code = main(arguments)
    raise SystemExit(code)


def test_a_character_unknown_to_the_terminal_is_escaped(run, tmp_path) -> None:
    arguments = ["--checkpoint", str(run.path), "--prompt", "\u00e9", "--max-tokens", "1"]
    assert start_ranks(_on_an_ascii_terminal, 1, arguments, tmp_path / "out").join() == [0]
    assert (tmp_path / "out").read_text("ascii").startswith("\\xe9")


def test_prompt_ids_are_used_unchanged(run) -> None:
    (by_ids,) = objects(generate(run, "--prompt-ids", "256,98,99", "--temperature", 0, "--json"))
    (by_text,) = objects(generate(run, "--prompt", "bc", "--temperature", 0, "--json"))
    assert by_ids["tokens"] == by_text["tokens"] and by_ids["prompt_tokens"] == by_text["prompt_tokens"]
    assert by_ids["prompt"] is None


def test_max_tokens_and_ignore_end_set_the_length(run) -> None:
    greedy = ("--prompt", "f", "--temperature", 0, "--json")
    (short,) = objects(generate(run, *greedy, "--max-tokens", 2))
    assert short["tokens"] == [*b"gh"] and short["finish"] == "length"
    (long,) = objects(generate(run, *greedy, "--max-tokens", 50, "--ignore-end"))
    assert long["tokens"][:3] == [*b"gh", END] and len(long["tokens"]) == 50  # beyond the context of 32 too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "windows" else name for name in MODELS]
)
def test_with_and_without_a_cache_alone_and_side_by_side(folder, tmp_path_factory, name) -> None:
    scratch = tmp_path_factory.mktemp("models")
    (scratch / "data").symlink_to(folder / "data")
    model = trained(scratch, *MODELS[name])
    prompts = ["a", "abcdefgh" * 2, "xyz"]
    common = [
        "--temperature",
        1.5,
        "--top-k",
        40,
        "--top-p",
        0.95,
        "--seed",
        7,
        "--max-tokens",
        40,
        "--ignore-end",
    ]
    common += ["--json", "--dtype", "float64"]
    together = objects(generate(model, *common, *(each for text in prompts for each in ("--prompt", text))))
    for text, found in zip(prompts, together, strict=True):
        assert objects(generate(model, *common, "--prompt", text)) == [found]
    assert objects(generate(model, *common, "--no-cache", "--prompt", prompts[2])) == [together[2]]
    assert len(set(together[0]["tokens"])) > 5


@pytest.mark.parametrize("recipe", [pytest.param("blockwise", marks=pytest.mark.slow), "mxfp8"])
def test_a_model_trained_in_float8_writes_in_float8_on_request(folder, tmp_path, recipe: str) -> None:
    """With a cache, a token has the same codes as in the whole text, because no block spans tokens."""
    (tmp_path / "data").symlink_to(folder / "data")
    model = trained(tmp_path, f"--precision.float8={recipe}", *MOE)
    common = ("--prompt", "a", "--temperature", 3, "--seed", 7, "--max-tokens", 200, "--ignore-end")
    common += ("--json", "--dtype", "float64")
    (cached,) = objects(generate(model, *common, "--float8"))
    assert objects(generate(model, *common, "--float8", "--no-cache")) == [cached]
    assert objects(generate(model, *common)) != [cached]


def test_float8_of_a_run_without_it_is_refused(run) -> None:
    result = generate(run, "--prompt", "a", "--float8")
    assert result.code == BAD_CONFIG and "was trained with precision.float8 = none" in refusal(result)


def test_the_seed_determines_the_text(run) -> None:
    texts = [generate(run, "--prompt", "a", "--temperature", 3, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_any_folder_of_the_run_is_accepted(run) -> None:
    first = run.path / "checkpoints" / "step-00000010"
    found = {
        path: objects(
            call(
                run.path.parent,
                "generate",
                "--checkpoint",
                path,
                "--prompt",
                "b",
                "--temperature",
                0,
                "--json",
            )
        )[0]
        for path in (run.path, run.path / "checkpoints", run.path / "checkpoints" / "step-00000030", first)
    }
    assert found.pop(first)["step"] == 10
    assert {each["step"] for each in found.values()} == {30}


def test_control_characters_of_a_text_do_not_reach_the_terminal(run, tmp_path) -> None:
    """With byte tokens, prompt ids may encode any text."""
    clear = ",".join(map(str, b"\x1b[2J\r\x9b\n\t"))
    one = call(tmp_path, "generate", "--checkpoint", run.path, "--prompt-ids", clear, "--max-tokens", "4")
    assert one.out.startswith("\\x1b[2J\\r") and "\n\t" in one.out
    two = call(tmp_path, "generate", "--checkpoint", run.path, "--prompt-ids", clear, "--prompt-ids", clear)
    assert "\x1b" not in one.out + two.out and two.out.count("\\x1b[2J") >= 2


def test_an_impossible_draft_prints_no_prompt(run, tmp_path) -> None:
    result = call(tmp_path, "generate", "--checkpoint", run.path, "--prompt", "b", "--draft")
    assert "--draft" in refusal(result) and result.out == ""


def test_a_damaged_checkpoint_is_skipped_and_left_in_place(run, tmp_path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    newest = copy / "checkpoints" / "step-00000030"
    data = next(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    result = call(tmp_path, "generate", "--checkpoint", copy, "--prompt", "b", "--json")
    assert objects(result)[0]["step"] == 20 and "step-00000030 is damaged" in result.err
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == names
    alone = call(tmp_path, "generate", "--checkpoint", newest, "--prompt", "b")
    assert alone.code == NO_CHECKPOINT and refusal(alone).count("wrong checksum") == 1
    trusted = call(tmp_path, "generate", "--checkpoint", newest, "--prompt", "b", "--no-verify", "--json")
    assert objects(trusted)[0]["step"] == 30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no prompt: give --prompt TEXT or --prompt-ids"),
        (["--prompt-ids", "1,x"], "'1,x' is not a list of token ids"),
        (["--prompt-ids", ""], "is not a list of token ids"),
        (["--prompt-ids", "3,258"], "token 258 of the prompt: must be from 0 to 257"),
        (["--prompt", "a", "--temperature", "-1"], "at least 1e-6"),
        (["--prompt", "a", "--temperature", "1e-320"], "at least 1e-6"),
        (["--prompt", "a", "--temperature", "nan"], "at least 1e-6"),
        (["--prompt", "a", "--top-p", "0"], "more than 0"),
        (["--prompt", "a", "--max-tokens", "0"], "at least 1"),
        (["--prompt", "a", "--no-cache", "--draft"], "cannot be combined with --no-cache"),
        (["--prompt", "a", "--device", "gpu7"], "--device gpu7: cannot be used"),
        (["--prompt", "a", "--tokenizer", "absent.model"], "tokenizer absent.model: cannot be read"),
        (["--prompt", "a", "--tokenizer", "x" * 300], "cannot be read: File name too long"),
        (["--prompt", "a", "--checkpoint", "absent"], "absent: does not exist"),
        (
            ["--prompt", "a", "--checkpoint", "absent", "--tokenizer", "typo"],
            "tokenizer typo: cannot be read",
        ),
        (
            ["--prompt", "a", "--checkpoint", "absent", "--prompt", "b", "--draft"],
            "--draft continues one prompt",
        ),
        (["--prompt", "a", "--checkpoint", "x" * 300], "cannot be read: File name too long"),
        (["--prompt", "a", "--checkpoint", "data"], "data: holds no complete checkpoint"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(run, arguments, sentence) -> None:
    result = generate(run, *arguments)
    assert result.code == BAD_CONFIG and sentence in refusal(result)
    assert result.out == ""


def test_a_run_without_a_tokenizer_takes_ids_alone(tmp_path) -> None:
    run = Run(tmp_path, "--train.steps=2")
    assert run() == 0
    result = generate(run, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--temperature", 0)
    assert re.fullmatch(r"1 2 3( \d+){4}\n", result.out)
    refused = generate(run, "--prompt", "a")
    assert refused.code == BAD_CONFIG and "holds no tokenizer: give --prompt-ids" in refusal(refused)
    (found,) = objects(
        generate(run, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--temperature", 0, "--json")
    )
    assert found["text"] is None and result.out.split()[3:] == [str(token) for token in found["tokens"]]


def test_a_run_carries_its_tokenizer(tmp_path) -> None:
    """Also a Hugging Face tokenizer. Generation works after the original is removed."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([], special)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    prepared(tmp_path, str(path))
    run = trained(tmp_path, tokenizer=str(path), steps=30)
    path.unlink()
    result = generate(run, "--prompt", "bcd", "--temperature", 0)
    assert result.out == "bcdefgh\n", result.err
    empty = generate(run, "--prompt", "", "--temperature", 0, "--max-tokens", 3, "--json")
    (found,) = objects(empty)
    assert found["prompt_tokens"] == [0], "a document follows the end of another"


def test_transformers_writes_the_same_with_the_exported_model(run, tmp_path, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    exported = call(tmp_path, "convert", "to-hf", "--input", run.path, "--output", "exported")
    assert exported.code == FINISHED, exported.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for prompt in ("bcd", "xyz", "a"):
        (found,) = objects(
            generate(run, "--prompt", prompt, "--temperature", 0, "--max-tokens", 12, "--json")
        )
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == found["prompt_tokens"]
        written = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
        assert written[ids.shape[1] :].tolist() == found["tokens"]
