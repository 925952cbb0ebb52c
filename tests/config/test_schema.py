"""Every public key exists, accepts its off value and is documented."""

import pickle
import re
import subprocess
import sys

import pytest

from forge.config.keys import keys, sections
from tests.support.configs import complaint, load, tiny

# Keys used by job scripts and other programs. None may be removed or change its off value.
PUBLIC = {
    "run.name": "x",
    "run.output_dir": "runs",
    "run.seed": "0",
    "run.deterministic": "false",
    "model.kind": "transformer",
    "model.dim": "64",
    "model.n_layers": "2",
    "model.n_heads": "8",
    "model.n_kv_heads": "4",
    "model.head_dim": "8",
    "model.ffn_dim": "96",
    "model.vocab_size": "128",
    "model.norm_eps": "1e-5",
    "model.rope_theta": "500000",
    "model.tie_embeddings": "false",
    "model.qk_norm": "false",
    "model.attention_bias": "false",
    "parallel.data_parallel": "fsdp2",
    "parallel.dp_replicate": "1",
    "parallel.dp_shard": "-1",
    "parallel.tp": "1",
    "parallel.cp": "1",
    "parallel.pp": "1",
    "parallel.ep": "1",
    "parallel.sequence_parallel": "true",
    "parallel.loss_parallel": "true",
    "parallel.context": "allgather",
    "parallel.reshard_after_forward": "auto",
    "parallel.cpu_offload": "false",
    "pipeline.schedule": "1F1B",
    "pipeline.layers_per_stage": "0",
    "pipeline.module_names": "[]",
    "pipeline.round": "up",
    "precision.storage": "float32",
    "precision.compute": "bfloat16",
    "precision.reduce": "float32",
    "precision.fp32_modules": "[]",
    "precision.float8": "none",
    "precision.float8_all_gather": "auto",
    "activation_checkpoint.mode": "none",
    "activation_checkpoint.modules": "[]",
    "compile.enabled": "false",
    "compile.loss": "false",
    "data.sources": '[{path = "synthetic", weight = 1.0}]',
    "data.tokenizer": "bytes",
    "data.document_mask": "false",
    "data.validation": "[]",
    "optimizer.name": "adamw",
    "optimizer.lr": "3e-4",
    "optimizer.weight_decay": "0.1",
    "optimizer.betas": "[0.9, 0.95]",
    "optimizer.eps": "1e-8",
    "schedule.name": "constant",
    "schedule.warmup_steps": "0",
    "train.steps": "10",
    "train.seq_len": "32",
    "train.global_batch_size": "8",
    "train.micro_batch_size": "1",
    "train.grad_clip_norm": "0",
    "train.z_loss_coef": "0",
    "checkpoint.interval": "0",
    "checkpoint.keep_last": "3",
    "checkpoint.mode": "async",
    "checkpoint.resume": "none",
    "checkpoint.init": "",
    "evaluate.interval": "0",
    "metrics.log_interval": "10",
    "resilience.step_timeout_s": "0",
    "resilience.time_limit_s": "0",
    "resilience.max_skipped_steps": "10",
}
MOE = {
    "n_experts", "top_k", "n_shared_experts", "expert_dim", "score_function", "normalize_top_k", "balance",
    "aux_loss_coef", "z_loss_coef", "bias_update_rate", "n_dense_layers",
}  # fmt: skip


def test_all_public_keys_are_accepted_together_at_their_off_values(tmp_path) -> None:
    load(tmp_path, *(f"--{key}={value}" for key, value in PUBLIC.items()))


def test_all_keys_of_a_mixture_of_experts_are_known() -> None:
    assert {f"model.moe.{name}" for name in MOE} <= set(keys())


UNUSED = [
    ("pipeline.schedule", "ZBVZeroBubble"),
    ("pipeline.schedule", "plans/mine.csv"),
    ("pipeline.layers_per_stage", "3"),
    ("parallel.context", "ring"),
    ("parallel.sequence_parallel", "false"),
    ("precision.float8_all_gather", "true"),
    ("activation_checkpoint.modules", '["attention"]'),
    ("schedule.decay_fraction", "1.0"),
    ("evaluate.interval", "5"),
    ("checkpoint.init", "some/folder"),
]


@pytest.mark.parametrize(("key", "value"), UNUSED)
def test_a_valid_value_of_an_unused_key_is_ignored(tmp_path, key: str, value: str) -> None:
    load(tmp_path, f"--{key}={value}", "--schedule.name=constant")


def test_every_key_and_section_has_a_meaning() -> None:
    assert [key.name for key in keys().values() if len(key.meaning) < 8] == []
    assert [name for name, section in sections().items() if not section.__doc__] == []


def test_defaults() -> None:
    config = tiny()
    assert config.run.name == "run" and config.run.output_dir == "runs"
    assert (config.parallel.dp_shard, config.parallel.dp_replicate, config.parallel.tp) == (-1, 1, 1)
    assert config.parallel.sequence_parallel and config.parallel.loss_parallel
    precision = config.precision
    assert (precision.storage, precision.compute, precision.reduce) == ("float32", "bfloat16", "float32")
    assert (config.checkpoint.resume, config.checkpoint.keep_last) == ("auto", 3)


def test_saves_warmup_and_evaluation_are_on_by_default(tmp_path) -> None:
    """An explicit 0 means off."""
    config = tiny()
    assert (config.checkpoint.interval, config.checkpoint.interval_minutes) == (None, 30.0)
    assert config.schedule.warmup_steps is None and config.evaluate.interval == 1000
    off = load(tmp_path, "--checkpoint.interval=0", "--schedule.warmup_steps=0", "--evaluate.interval=0")
    assert (off.checkpoint.interval, off.schedule.warmup_steps, off.evaluate.interval) == (0, 0, 0)


def test_heads_follow_from_the_other_keys() -> None:
    assert (tiny().model.n_kv_heads, tiny().model.head_dim) == (8, 8)


def test_an_integer_is_accepted_as_a_float_and_converted(tmp_path) -> None:
    lr = load(tmp_path, "--optimizer.lr=1").optimizer.lr
    assert type(lr) is float and lr == 1.0


def test_a_config_cannot_be_changed_and_can_be_pickled() -> None:
    config = tiny()
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 5
    assert pickle.loads(pickle.dumps(config)) == config


def test_importing_the_configuration_does_not_import_torch() -> None:
    code = "import sys, forge.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "option",
    [
        "train.steps=99999999999999999999999",
        "train.global_batch_size=1000000000",
        "train.seq_len=9999999999",
        "model.n_layers=100000",
        "model.dim=1000000",
        "model.vocab_size=1000000000",
    ],
)
def test_an_absurd_size_is_refused_at_once_with_the_largest_one(tmp_path, option: str) -> None:
    key, _, value = option.partition("=")
    assert re.search(
        rf"{key} = {value} .*allowed: integer >= 1 and <= \d+", complaint(tmp_path, f"--{option}")
    )
