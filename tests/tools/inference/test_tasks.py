"""The adapter to lm-eval: its results against the model's own logits, and a real task on local files."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge.data.tokenizer import ByteTokenizer
from forge.runtime.errors import BAD_CONFIG, FINISHED, UserError
from forge.tools.inference import Sampling, generate, recomputed
from tests.support.small_models import small_config, small_model
from tests.support.trained import call, on_prepared, prepared, trained

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'forge[eval]'")

from forge.tools.inference.tasks import Scorer

SEQ_LEN = 24
BEGIN, END = 256, 257


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model(small_config(vocab_size=258, init_std=0.6), SEQ_LEN)


@pytest.fixture(scope="module")
def scorer(model) -> Scorer:
    opened: Any = SimpleNamespace(
        model=model, tokenizer=ByteTokenizer(), device=torch.device("cpu"), path=Path("run")
    )
    return Scorer(opened, batch_size=3)


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@torch.no_grad()
def by_hand(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score token by token, each from at most the SEQ_LEN tokens before it."""
    text = (context + continuation)[-SEQ_LEN - 1 :]
    total, greedy = 0.0, True
    for place in range(len(text) - len(continuation), len(text)):
        logits = model(torch.tensor([text[:place]]))[0, -1]
        total += float(logits.log_softmax(-1)[text[place]])
        greedy &= int(logits.argmax()) == text[place]
    return total, greedy


def test_the_likelihood_of_a_continuation(model, scorer) -> None:
    best = int(model(torch.tensor([[BEGIN, *b"ab"]]))[0, -1].argmax())
    pairs = [
        ("ab", "c"),
        ("", "xyz"),
        ("a longer context than others", " and end"),
        ("q ", "r"),
        ("z", "y" * 20),
    ]
    if best < 128:
        pairs.append(("ab", chr(best)))
    found = scorer.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        moved = len(context) - len(context.rstrip())  # lm-eval counts spaces between both to the continuation
        both = context + continuation
        begin = len(context) - moved
        expected = by_hand(model, [BEGIN, *both[:begin].encode()], list(both[begin:].encode()))
        assert score == pytest.approx(expected[0], abs=1e-9) and greedy == expected[1]


def test_greedy_continuations_are_recognised(model, scorer) -> None:
    context = [BEGIN, *b"ab"]
    (steps,) = zip(*generate(recomputed(model, SEQ_LEN), [context], 3, Sampling()), strict=True)
    greedy = list(steps)
    other = [*greedy[:2], (greedy[2] + 1) % 258]
    found = scorer._loglikelihood_tokens([(None, context, greedy), (None, context, other)])
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_a_whole_text_is_scored_in_windows_and_each_token_once(model, scorer) -> None:
    texts = [
        "short",
        "x" * SEQ_LEN,
        "a text that is longer than the model's context, by more than one window",
        "",
    ]
    found = scorer.loglikelihood_rolling(requests(*((text,) for text in texts)))
    for text, score in zip(texts, found, strict=True):
        tokens, expected = [BEGIN, *text.encode()], 0.0
        for begin in range(1, len(tokens), SEQ_LEN):
            expected += by_hand(model, tokens[:begin], tokens[begin : begin + SEQ_LEN])[0]
        assert score == pytest.approx(expected, abs=1e-9)


def test_writes_until_a_stop_word_the_end_or_the_limit(model, scorer) -> None:
    prompts, options = ["ab", "hello there", "ab"], {"until": [], "max_gen_toks": 12}
    whole = scorer.generate_until(requests(*((prompt, options) for prompt in prompts)))
    for prompt, text in zip(prompts, whole, strict=True):
        tokens = [BEGIN, *prompt.encode()]
        steps = generate(recomputed(model, SEQ_LEN), [tokens], 12, Sampling(), lambda _, new: new[-1] == END)
        assert text == ByteTokenizer().decode([token for (token,) in steps if token is not None])
    visible = next(text for text in whole if len(text) > 2)
    prompt, end = prompts[whole.index(visible)], visible[2]
    (cut,) = scorer.generate_until(requests((prompt, {"until": end, "max_new_tokens": 12})))
    assert cut == visible.split(end)[0]
    sampled = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    assert scorer.generate_until(requests((prompt, sampled))) != [visible]


def test_without_a_begin_token_empty_texts_follow_the_end_of_another(model) -> None:
    class NoBegin(ByteTokenizer):
        bos_id = None

    opened: Any = SimpleNamespace(
        model=model, tokenizer=NoBegin(), device=torch.device("cpu"), path=Path("run")
    )
    scorer = Scorer(opened)
    assert scorer.prefix_token_id == END and scorer.tok_encode("") == [END]
    assert scorer.tok_encode("ab") == list(b"ab")
    (text,) = scorer.generate_until(requests(("", {"until": [], "max_gen_toks": 4})))
    steps = generate(recomputed(model, SEQ_LEN), [[END]], 4, Sampling(), lambda _, new: new[-1] == END)
    assert text == ByteTokenizer().decode([token for (token,) in steps if token is not None])
    opened.tokenizer.eos_id = None
    with pytest.raises(UserError, match="no token that begins or ends a document"):
        Scorer(opened)


def test_a_continuation_longer_than_the_context_is_refused(scorer) -> None:
    with pytest.raises(UserError, match=r"continuation of 30 tokens .* context of 24"):
        scorer.loglikelihood(requests(("a", "b" * 30)), disable_tqdm=True)


TASKS = {
    "next_letter": """
        output_type: multiple_choice
        doc_to_text: "{{begin}}"
        doc_to_choice: ["efgh", "hgfe"]
        doc_to_target: 0
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
    """,
    "go_on": """
        output_type: generate_until
        doc_to_text: "{{begin}}"
        doc_to_target: "ef"
        target_delimiter: ""
        generation_kwargs: {until: ["g"], max_gen_toks: 8}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
    "whole_texts": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{begin}}efgh"
        metric_list: [{metric: bits_per_byte}]
    """,
}


def write_tasks(folder: Path) -> None:
    """TASKS in FOLDER/tasks, on documents beside them."""
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"begin": text}) + "\n" for text in ("bcd", "cd", "d", "abcd")))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        lines = [line[8:] for line in text.strip("\n").splitlines()]
        source = f"data_files: {{test: {documents}}}, cache_dir: {folder / 'cache'}"
        lines += [f"task: {name}", "dataset_path: json", f"dataset_kwargs: {{{source}}}", "test_split: test"]
        (folder / "tasks" / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def scores(folder: Path, *options: str) -> dict[str, dict[str, float]]:
    """Return the output of scripts/evaluate.py for the run in FOLDER."""
    result = call(folder, "evaluate", *AT, "--tasks", ",".join(TASKS), "--json", *options)
    assert result.code == FINISHED, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("{")]
    return json.loads(line)["tasks"]


AT = ("--checkpoint", "run", "--include-path", "tasks")


def test_real_tasks_on_local_files(tmp_path) -> None:
    prepared(tmp_path)
    trained(tmp_path, steps=30)
    write_tasks(tmp_path)
    found = scores(tmp_path)
    assert found["next_letter"]["acc,none"] == 1.0
    assert found["go_on"]["exact_match,none"] == 1.0
    assert 0 < found["whole_texts"]["bits_per_byte,none"] < 1
    unknown = call(tmp_path, "evaluate", *AT, "--tasks", "nothing_like_it")
    assert unknown.code == BAD_CONFIG and "--tasks nothing_like_it: lm-eval has no such task" in unknown.err


def test_a_rank_that_cannot_load_the_tasks_costs_an_evaluation_and_no_run(tmp_path) -> None:
    prepared(tmp_path)
    write_tasks(tmp_path)
    options = [f"--evaluate.tasks={json.dumps(list(TASKS))}", f"--evaluate.tasks_path={tmp_path / 'tasks'}"]
    run = on_prepared(tmp_path, *options, "--evaluate.tasks_interval=5", "--train.steps=10")
    patch = "tests.support.tasks:cannot_load_once"
    assert run.start(world=2, patch=patch).join() == [0, 0], run.output()
    assert "no task was scored at step 5: loading tasks failed on rank 1" in run.output()
    assert [line["step"] for line in run.metrics() if "tasks" in line] == [10]


@pytest.mark.parametrize("layout", ["dp_shard", "tp"])
def test_tasks_in_the_loop_have_the_scores_of_the_checkpoint_and_a_resumed_run_none_twice(
    tmp_path, layout: str
) -> None:
    """Killed in step 6, with step 5 reported and not saved, it resumes from step 4 and makes step 5 again."""
    prepared(tmp_path)
    write_tasks(tmp_path)
    options = [f"--evaluate.tasks={json.dumps(list(TASKS))}", f"--evaluate.tasks_path={tmp_path / 'tasks'}"]
    options += ["--evaluate.tasks_interval=5", f"--parallel.{layout}=2", "--checkpoint.interval=4"]
    run = on_prepared(tmp_path, *options)
    codes = run.start(world=2, fault="step:6:0").join()
    assert codes[0] == -signal.SIGKILL
    assert [line["step"] for line in run.metrics() if "tasks" in line] == [5]
    assert run(world=2) == 0, run.output()
    lines = [line for line in run.metrics() if "tasks" in line]
    assert [line["step"] for line in lines] == [5, 10]
    for task, metrics in scores(tmp_path).items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert lines[-1]["tasks"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
