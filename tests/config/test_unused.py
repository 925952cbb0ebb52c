"""Keys without effect are reported with the reason. Shipped configurations set none."""

import re

import pytest

from forge.config import load_config, unused_keys
from forge.config.keys import keys, sections
from forge.config.load import CONFIGS
from forge.config.section import Unused

NAMES = ["embedding.weight", "layers.0.attention_norm.weight", "norm.weight"]


def unused(*options: str, config: str = "debug") -> list[str]:
    return unused_keys(load_config([f"--config={config}", *options]), NAMES)


def test_every_reason_names_an_existing_key() -> None:
    reasons = {
        one.reason
        for section in sections().values()
        for field in section.model_fields.values()
        for one in field.metadata
        if isinstance(one, Unused)
    }
    named = {key for reason in reasons for key in re.findall(r"\b[a-z]\w*(?:\.\w+)+", reason)}
    assert len(reasons) > 30 and named <= keys().keys() | sections().keys()


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_shipped_configurations_set_no_unused_key(name: str) -> None:
    assert unused(config=name) == []


YARN = '{kind = "yarn", factor = 2.0, original_max_position = 64, low_freq_factor = 0.5}'


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--evaluate.interval=0"], "data.validation (evaluate.interval is 0)"),
        (["--data.validation=[]"], "evaluate.interval (data.validation is empty)"),
        (["--evaluate.sample_interval=0"], "evaluate.sample_tokens, evaluate.sample_temperature (evaluate.s"),
        (["--data.tokenizer=none"], "evaluate.sample_interval (there is no tokenizer)"),
        (['--data.sources=[{path = "synthetic"}]'], "data.tokenizer (all data.sources are synthetic)"),
        (["--data.mixture_block=99"], "data.mixture_block (there is one source)"),
        (
            [
                '--data.sources=[{path="synthetic"},{path="synthetic",weight=0.0}]',
                "--phase=[{weights=[2.0,0.0]}]",
            ],
            "data.tokenizer (all data.sources are synthetic)",
        ),
        (["--data.cache_gib=99"], "data.cache_gib (no source is a URL)"),
        (["--data.on_max_epochs=refuse"], "data.on_max_epochs (no source has max_epochs)"),
        (["--data.at_cap=refuse"], "data.at_cap (replaced by data.on_max_epochs)"),
        (["--model.sliding_window_pattern=2"], "model.sliding_window_pattern (model.sliding_window is 0)"),
        (
            ["--model.attention=mla", "--model.n_kv_heads=1", "--model.qk_norm=true"],
            "model.n_kv_heads, model.qk_norm (model.attention is mla)",
        ),
        (["--model.mla.v_head_dim=9"], "model.mla.v_head_dim (model.attention is not mla)"),
        (["--model.sliding_rope_theta=9"], "model.sliding_rope_theta (model.sliding_window is 0)"),
        (
            [
                "--model.sliding_window=9",
                "--model.sliding_window_pattern=2",
                '--model.layer_pattern=["nope"]',
            ],
            "model.sliding_window_pattern (model.layer_pattern is set)",
        ),
        (
            ["--model.sliding_window=9", '--model.layer_pattern=["nope","full"]'],
            "model.sliding_window (model.layer_pattern has no sliding layer)",
        ),
        (
            [f"--model.rope_scaling={YARN}"],
            "model.rope_scaling.low_freq_factor (model.rope_scaling.kind is not llama3)",
        ),
        (
            ['--model.rope_scaling={kind = "linear", factor = 2.0, original_max_position = 9}'],
            "model.rope_scaling.original_max_position (model.rope_scaling.kind is linear)",
        ),
        (["--parallel.context=ring"], "parallel.context (parallel.cp is 1)"),
        (["--parallel.loss_parallel=false"], "parallel.loss_parallel (parallel.tp is 1)"),
        (["--parallel.ep=2"], "parallel.ep (there is no [model.moe])"),
        (
            ["--pipeline.schedule=GPipe", "--pipeline.round=up"],
            "pipeline.schedule, pipeline.round (parallel.pp is 1)",
        ),
        (
            ["--activation_checkpoint.every=2"],
            "activation_checkpoint.every (activation_checkpoint.mode is not",
        ),
        (
            ["--schedule.name=cosine", "--schedule.decay_fraction=0.5"],
            "schedule.decay_fraction (schedule.name is not",
        ),
        (["--checkpoint.interval_minutes=5"], "checkpoint.interval_minutes (checkpoint.interval is set)"),
        (
            ['--checkpoint.init_changes=["model.norm_eps"]'],
            "checkpoint.init_changes (checkpoint.init is empty)",
        ),
        (
            ["--precision.mixed_storage_rule=per_parameter"],
            "precision.mixed_storage_rule (all parameters have one storage format)",
        ),
        (["--profile.ranks=[1]"], "profile.ranks (profile.span is empty)"),
        (
            ['--optimizer.no_decay=["*.norm.weight"]'],
            '"*.norm.weight" of optimizer.no_decay (matches no parameter)',
        ),
        (
            ['--optimizer.no_decay=["x"]', "--optimizer.weight_decay=0"],
            "optimizer.no_decay (optimizer.weight_decay is",
        ),
    ],
)
def test_a_key_is_named_with_the_reason(options: list[str], key: str) -> None:
    lines = unused(*options)
    assert any(key in line for line in lines), lines


def test_balancing_has_the_keys_of_its_kind() -> None:
    kinds = {"bias": "aux_loss_coef", "aux_loss": "bias_update_rate"}
    for kind, key in kinds.items():
        options = (
            f"--model.moe.balance={kind}",
            "--model.moe.aux_loss_coef=0.1",
            "--model.moe.bias_update_rate=0.1",
        )
        (line,) = unused(*options, config="moe_debug")
        assert line.startswith(f"model.moe.{key} (")


def test_used_keys_and_defaults_are_not_reported() -> None:
    assert (
        unused("--schedule.decay_fraction=0.5", "--pipeline.schedule=1F1B", "--parallel.context=allgather")
        == []
    )
    assert unused('--optimizer.no_decay=["*norm.weight", "*bias"]') == []


@pytest.mark.parametrize(
    ("engine", "option"),
    [
        ("fsdp2", "check_gradients=finite"),
        ("fsdp2", "symmetric_memory=true"),
        ("zero1", "prefetch=2"),
        ("ddp", "defer_gradient_reduction=true"),
    ],
)
def test_a_key_of_another_engine_is_named(engine: str, option: str) -> None:
    key = f"parallel.{option.partition('=')[0]}"
    lines = unused(f"--parallel.data_parallel={engine}", f"--parallel.{option}")
    assert any(line.startswith(f"{key} (parallel.data_parallel is") for line in lines), lines


def test_a_source_that_only_a_phase_reads_is_used() -> None:
    sources = '--data.sources=[{path="synthetic"},{path="a.bin",dtype="uint16",eos_id=0,weight=0.0}]'
    options = sources, "--data.mixture_block=99", "--evaluate.sample_interval=5"
    assert any("data.mixture_block" in line for line in unused(*options))
    assert unused(*options, "--phase=[{until_tokens=99},{weights=[1.0,1.0]}]") == []
