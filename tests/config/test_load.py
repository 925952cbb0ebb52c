"""Files, overrides and the origin of values. All errors are reported at once, with the allowed values."""

import copy
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.config import load_config, parse_toml_text
from forge.config.explain import Values
from forge.config.keys import keys
from forge.config.load import CONFIGS, examine
from forge.runtime.errors import UserError
from tests.support.configs import REQUIRED, TINY, complaint, complaints, load, write


def test_a_config_is_found_by_path_and_by_name_with_or_without_suffix(tmp_path, monkeypatch) -> None:
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (path, path.removesuffix(".toml"), "tiny.toml", "tiny"):
        assert load_config(["--config", name]).run.name == "tiny"
    assert load_config(["--config=7b.toml"]) == load_config(["--config", str(CONFIGS / "7b")])


def test_a_path_wins_over_a_shipped_name(tmp_path, monkeypatch) -> None:
    write(tmp_path, name="debug.toml")
    monkeypatch.chdir(tmp_path)
    assert load_config(["--config", "debug.toml"]).model.dim == 64


def test_a_missing_config_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"--config debgu.toml: no such file; did you mean debug\?.*160m, 1b"):
        load_config(["--config", "debgu.toml"])


def test_a_config_name_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"--config x+: cannot be read: File name too long; configs/ has"):
        load_config(["--config", "x" * 300])


def test_the_run_is_named_after_the_file_unless_it_has_a_name(tmp_path) -> None:
    assert load(tmp_path).run.name == "tiny"
    assert load(tmp_path, "--run.name=other").run.name == "other"
    assert load_config(["--config", write(tmp_path, TINY + "[run]\nname = 'third'")]).run.name == "third"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb", "a\n"])
def test_a_run_name_is_a_file_name(tmp_path, name: str) -> None:
    assert "a file name" in complaint(tmp_path, f"--run.name={name}")


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--train.steps=5"], "train.steps", 5),
        (["--train.steps", "5"], "train.steps", 5),
        (["--train.steps=5", "--train.steps=6"], "train.steps", 6),
        (["--optimizer.lr=1e-3"], "optimizer.lr", 1e-3),
        (["--parallel.dp_shard", "-1"], "parallel.dp_shard", -1),
        (["--parallel.reshard_after_forward=4"], "parallel.reshard_after_forward", 4),
        (["--parallel.reshard_after_forward=never"], "parallel.reshard_after_forward", "never"),
        (["--run.deterministic", "true"], "run.deterministic", True),
        (["--run.name=x"], "run.name", "x"),
        (["--run.name='x'"], "run.name", "x"),
        (["--run.name=5"], "run.name", "5"),
        (["--run.name=2024-01-01"], "run.name", "2024-01-01"),
        (["--evaluate.sample_prompt", "-foo"], "evaluate.sample_prompt", "-foo"),
        (["--evaluate.sample_prompt=--foo"], "evaluate.sample_prompt", "--foo"),
        (["--evaluate.sample_prompt=a = b # c"], "evaluate.sample_prompt", "a = b # c"),
        (["--evaluate.sample_prompt=[1, 2"], "evaluate.sample_prompt", "[1, 2"),
        (["--checkpoint.init="], "checkpoint.init", ""),
        (["--optimizer.betas=[0.8, 0]"], "optimizer.betas", (0.8, 0.0)),
        (["--optimizer.no_decay", '["*"]'], "optimizer.no_decay", ("*",)),
        (["--precision.float8_all_gather=true"], "precision.float8_all_gather", True),
    ],
)
def test_overrides_are_toml_literals_and_bare_words_are_text(tmp_path, arguments, key, value) -> None:
    config = load(tmp_path, *arguments)
    found = getattr(getattr(config, key.split(".")[0]), key.split(".")[1])
    assert found == value and type(found) is type(value)


def test_a_list_of_tables_can_be_given_on_the_command_line(tmp_path) -> None:
    config = load(tmp_path, '--data.sources=[{path="a",weight=1},{path="b",weight=0.5}]')
    assert [(source.path, source.weight) for source in config.data.sources] == [("a", 1.0), ("b", 0.5)]


def test_an_override_creates_its_section(tmp_path) -> None:
    at = "--model.rope_scaling."
    scaling = load(
        tmp_path, f"{at}kind=yarn", f"{at}factor=4", f"{at}original_max_position=8"
    ).model.rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("yarn", 4.0)
    assert load(tmp_path, "--model.moe.n_experts=8").model.moe.top_k == 2


def test_a_block_of_samples_too_large_for_memory_is_refused(tmp_path) -> None:
    (line,) = complaints(tmp_path, f"--data.mixture_block={10**12}")
    assert line.endswith("(command line): allowed: integer >= 1 and <= 1000000")


def test_everything_wrong_is_reported_at_once_by_key(tmp_path) -> None:
    text = (
        TINY.replace("steps = 10", "steps = 0").replace("[train]", "[train]\nlearning = 1")
        + "[trian]\na = 1\n"
    )
    lines = complaints(
        tmp_path,
        "--optimizer.lr=-1",
        "extra",
        "--model.n_kv_heads=3",
        "--parallel.tp=2",
        "--model.kynd=x",
        text=text,
    )
    assert lines[0] == "8 errors in the configuration:"
    starts = (
        "extra:",
        "model.kynd",
        "train.steps",
        "train.learning",
        "optimizer.lr",
        "trian",
        "model.n_kv",
        "parallel.tp",
    )
    assert sorted(starts) == sorted(start for start in starts for line in lines[1:] if line.startswith(start))


def test_values_out_of_range_come_before_impossible_combinations(tmp_path) -> None:
    lines = complaints(tmp_path, "--model.n_kv_heads=3", "--train.steps=0")
    assert [line.split()[0] for line in lines[1:]] == ["train.steps", "model.n_kv_heads"]


def test_a_line_names_the_origin_of_the_value(tmp_path) -> None:
    text = TINY.replace("dim = 64", "dim = true")
    path = str(tmp_path / "tiny.toml")
    lines = complaints(tmp_path, "--train.steps=0", text=text)
    assert lines[1:] == [
        f"model.dim = true ({path} [model]): allowed: integer >= 1 and <= 262144",
        "train.steps = 0 (command line): allowed: integer >= 1 and <= 1000000000",
    ]
    text = TINY + "[model.moe]\nn_experts = 4\ntop_k = 9\n"
    assert f"model.moe.top_k = 9 ({path} [model.moe]): must be at most" in complaint(tmp_path, text=text)
    assert "model.n_kv_heads = 5 (command line)" in complaint(tmp_path, "--model.n_kv_heads=5")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("--train.stepss=5", "no such key in [train]; did you mean train.steps?"),
        ("--train.lr=5", "no such key in [train]; lr is a key of [optimizer]"),
        ("--model.n_experts=5", "n_experts is a key of [model.moe]"),
        ("--train.tensorbord=true", "did you mean metrics.tensorboard?"),
        ("--train.zzzz=5", "no such key in [train]; its keys are steps, seq_len"),
        ("--trian.steps=5", "no such section; did you mean [train]?"),
        ("--moe.n_experts=5", "no such section; moe is a key of [model]"),
        ("--parallel.data_parallel=fsdp", 'one of fsdp2, zero2, zero1, ddp; did you mean "fsdp2"?'),
        ("--pipeline.schedule=1f1b", 'did you mean "1F1B"?'),
        ("--precision.compute=float16", "loss scaling"),
        ("--train.steps=1e3", "allowed: integer >= 1 and <= 1000000000; write 1000"),
        ("--train.steps=true", "allowed: integer >= 1"),
        ('--train.steps="5"', "allowed: integer >= 1"),
        ("--optimizer.lr=nan", "allowed: number > 0"),
        ("--run.deterministic=1", "allowed: true or false"),
        ("--parallel.dp_shard=0", "allowed: -1, or integer >= 1"),
        ("--optimizer.betas=[0.9, 1.0]", "list of 2: number >= 0 and < 1"),
        ("--data.sources=[]", "data.sources = [] (command line): allowed: non-empty list of {path = text"),
        ('--data.sources=[{path="a",wait=1}]', "data.sources[0].wait = 1 (command line): no such key"),
        ("--data.sources=[{weight=1}]", "data.sources[0].path: missing from command line"),
        ("--data.sources=[{path=a}]", "not a TOML literal"),
        ("--data.sources.0.path=a", "data.sources is not a section"),
        ("--train.steps.x=1", "train.steps is not a section"),
        ("--run.name=\udcff", "not UTF-8"),
    ],
)
def test_a_wrong_value_is_reported_with_the_allowed_and_nearest_ones(
    tmp_path, override: str, hint: str
) -> None:
    assert hint in complaint(tmp_path, override)


def test_missing_keys_are_named_with_their_meaning(tmp_path) -> None:
    lines = complaints(tmp_path, text="[model]\ndim = 8\n")
    path = tmp_path / "tiny.toml"
    assert f"model.n_heads: missing from {path}; needed: integer >= 1 (Number of query heads)" in lines
    assert f"[train]: missing from {path}; needed: steps, seq_len, global_batch_size" in lines


def test_a_non_table_section_is_refused(tmp_path) -> None:
    line = complaint(tmp_path, text="compile = 3\n" + TINY)
    assert (
        line == f"compile = 3 ({tmp_path / 'tiny.toml'}): must be a section, a table with the keys "
        "enabled, loss, optimizer, backend"
    )


def test_a_syntax_error_names_file_line_and_text(tmp_path) -> None:
    line = complaint(tmp_path, text="[model]\ndim = = 3\n")
    assert str(tmp_path / "tiny.toml") in line and "line 2" in line and line.endswith("dim = = 3")


def test_a_non_text_file_is_refused(tmp_path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"x.toml: is not UTF-8 text"):
        load_config(["--config", str(tmp_path / "x.toml")])


def test_without_a_config_only_the_command_line_is_checked() -> None:
    with pytest.raises(UserError) as caught:
        load_config(["--train.steps=0"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and "--config: missing" in lines[1] and "train.steps = 0" in lines[2]


def test_a_text_is_parsed_without_a_file() -> None:
    assert parse_toml_text(TINY).train.steps == 10
    with pytest.raises(UserError, match=r"train.steps = 0 \(here \[train\]\)"):
        parse_toml_text(TINY.replace("steps = 10", "steps = 0"), "here")


JUNK = st.sampled_from(
    [None, True, 0, -1, 3, 2.5, "x", "", [], ["x"], [{}], {}, {"path": 3}, {"kind": "yarn"}]
)
PLACES = st.sampled_from(
    [*keys(), *{key.section for key in keys().values()}, "what", "train.what", "model.moe.what"]
)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(PLACES, JUNK), max_size=6), st.sets(st.sampled_from(REQUIRED), max_size=3))
def test_every_error_is_one_line_with_its_key(changes, missing) -> None:
    tree = copy.deepcopy(parse_toml_text(TINY).model_dump(mode="json", exclude_none=True))
    for place, junk in changes:
        table = tree
        for part in place.split(".")[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict) and junk is not None:
            table[place.rpartition(".")[2]] = copy.deepcopy(junk)
    for key in missing:
        section, _, name = key.partition(".")
        if isinstance(tree.get(section), dict):
            tree[section].pop(name, None)
    config, problems = examine(Values(tree, source="file"))
    assert config is not None or problems
    places = {place.partition(".")[0] for place in keys()} | {"what"}
    assert all(re.match(r"\[?(\w+)", str(problem))[1] in places for problem in problems)


def test_tokens_of_0_do_not_replace_the_number_of_steps(tmp_path) -> None:
    path = tmp_path / "short.toml"
    lines = (CONFIGS / "debug.toml").read_text().splitlines(keepends=True)
    path.write_text("".join("tokens = 8192\n" if line.startswith("steps = ") else line for line in lines))
    assert load_config(["--config", str(path)]).train.steps > 1
    with pytest.raises(UserError, match=r"train\.steps"):
        load_config(["--config", str(path), "--train.tokens=0"])
