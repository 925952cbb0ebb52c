"""Impossible combinations are refused with numbers and a remedy."""

import pytest

from forge.config import load_config, parse_toml_text, to_toml
from forge.runtime.errors import UserError
from tests.support.configs import TINY, complaint, load, write

LINEAR = ['--model.layer_pattern=["linear"]', "--model.linear_attention={n_key_heads=2,key_head_dim=4}"]
ROPE = "\n[model.rope_scaling]\nfactor = 8\noriginal_max_position = 16\n"
KEY_HEADS = (
    "must divide model.linear_attention.n_key_heads = 2, because every tp rank needs the same number of key heads; "
    "use one of 1, 2"
)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["--model.dim=68"],
            "model.dim = 68 (command line): must be a multiple of model.n_heads = 8; use 64 or 72,",
        ),
        (
            ["--model.dim=72"],
            "model.head_dim = 9 (default): must be even, because RoPE rotates pairs of features; use 10",
        ),
        (["--model.head_dim=7"], "model.head_dim = 7 (command line): must be even"),
        (
            ["--run.output_dir=s3://bucket/runs"],
            "not a URL; use a folder on a local or shared disk; to copy checkpoints",
        ),
        (
            ["--run.output_dir=~/runs"],
            "must not begin with ~, which forge does not replace with the home folder",
        ),
        (
            ["--data.cache_dir=~/cache", "--data.sources=[{path='s3://bucket/text'}]"],
            'data.cache_dir = "~/cache" (command line): must not begin with ~',
        ),
        (["--model.n_kv_heads=3"], "must divide model.n_heads = 8; use one of 1, 2, 4, 8"),
        (
            ['--model.layer_pattern=["full","nope","full"]'],
            "has 3 entries, more than model.n_layers = 2; leave some out",
        ),
        (["--model.rope_fraction=0.3"], "but RoPE rotates pairs; use 0.25"),
        (
            ["--model.attention=mla", "--model.mla={qk_rope_head_dim=7}"],
            "must be even, because RoPE rotates pairs of features; use 8",
        ),
        (
            ['--model.layer_pattern=["full","sliding"]'],
            "which need model.sliding_window; set model.sliding_window to",
        ),
        (
            ['--model.layer_pattern=["full","linear"]'],
            "has linear layers, which need the table [model.linear_attention]; set its keys",
        ),
        (
            ["--model.linear_attention={n_key_heads=2,key_head_dim=4}"],
            'needs linear layers; put "linear" into model.layer_pattern, or leave the table out',
        ),
        (
            [*LINEAR, "--model.linear_attention.n_value_heads=3"],
            "must be a multiple of model.linear_attention.n_key_heads = 2; use 2 or 4",
        ),
        (
            [*LINEAR, "--parallel.tp=4"],
            KEY_HEADS,
        ),
        (
            [*LINEAR, "--model.attention=mla", "--parallel.tp=4"],
            KEY_HEADS,
        ),
        (
            ['--model.rope_scaling={kind="yarn",factor=2}'],
            "must be above 0 with model.rope_scaling.kind = yarn",
        ),
        (['--data.sources=[{path="synthetic",weight=0}]'], "has no source with a weight > 0"),
        (['--data.validation=[{name="a",path="x"},{name="a",path="y"}]'], "more than one source named a"),
        (["--precision.compute=float64", "--precision.reduce=bfloat16"], "precision.reduce"),
        (["--precision.compute=float64", "--precision.storage=bfloat16"], "precision.storage"),
        (["--checkpoint.init=a", "--checkpoint.resume=b"], "set only one of these keys"),
        (["--precision.float8=rowwise", "--precision.float8_all_gather=true"], "use auto or false"),
        (
            ["--precision.float8=rowwise", "--train.seq_len=24"],
            "= 1 * 24 / 1 = 24; use another train.seq_len",
        ),
        (
            ["--parallel.shard_optimizer_over=dp"],
            "needs parallel.data_parallel = zero1 or zero2, but it is fsdp2; use dp_shard",
        ),
        (
            ["--parallel.shard_optimizer_over=dp", "--parallel.data_parallel=ddp"],
            "needs parallel.data_parallel = zero1 or zero2, but it is ddp",
        ),
        (
            ["--precision.float8=rowwise", "--parallel.data_parallel=zero1"],
            "needs parallel.data_parallel = fsdp2, because the buffers of zero1 cannot hold",
        ),
        (
            ["--checkpoint.resume=s3://bucket/run/step-00000010"],
            "must be a path on this machine, not a URL; copy the checkpoint to a local or shared disk, and name the copy",
        ),
        (
            ["--precision.float8=tensorwise", "--precision.float8_experts=true"],
            "needs precision.float8 = blockwise or mxfp8, but it is tensorwise; use auto or false",
        ),
        (
            [
                "--precision.float8=blockwise",
                "--precision.float8_emulate=false",
                '--precision.float8_exclude=["layers.0.*"]',
                "--model.moe.n_dense_layers=1",
                "--model.moe.n_experts=4",
                "--model.moe.top_k=2",
                "--model.moe.expert_dim=128",
            ],
            "cannot be false with blockwise, because no GPU has a kernel for routed experts in it; use auto, which emulates "
            "their products, or set precision.float8_experts = false",
        ),
        (
            ["--precision.float8=mxfp8", "--train.seq_len=160", "--parallel.cp=2"],
            "must be a multiple of 4 * 32 = 128, so that each of 4 parts of a sequence has whole blocks of 32 tokens; "
            "use 128 or 256",
        ),
        (
            [
                "--precision.float8=blockwise",
                "--train.seq_len=320",
                "--parallel.tp=2",
                "--model.attention=mla",
                '--precision.float8_exclude=["*.w*"]',
            ],
            "must be a multiple of 2 * 128 = 256, so that each of 2 parts of a sequence has whole blocks of 128 tokens; "
            "use 256 or 512",
        ),
        (
            [
                "--precision.float8=blockwise",
                "--train.seq_len=320",
                "--parallel.tp=2",
                "--parallel.sequence_parallel=false",
                "--model.moe.n_experts=4",
                "--model.moe.top_k=2",
                "--model.moe.expert_dim=128",
                "--model.moe.latent_dim=128",
                '--precision.float8_exclude=["*.w*"]',
            ],
            "must be a multiple of 2 * 128 = 256, so that each of 2 parts of a sequence has whole blocks of 128 tokens; "
            "use 256 or 512",
        ),
        (
            ["--precision.float8=blockwise", "--model.ffn_dim=256", "--parallel.tp=2", "--model.dim=64"],
            "leaves 32 features of attention.wq on each rank, which is not a multiple of the block size 128; use 1, "
            'set precision.float8 = mxfp8 (blocks of 32), or add "*.wq", "*.wk", "*.wv", "*.wo" to precision.float8_exclude',
        ),
        (
            ["--precision.float8=blockwise", "--precision.float8_all_gather=true", "--compile.enabled=true"],
            "cannot be true with compile.enabled = true; use auto or false",
        ),
        (
            [
                *("--precision.float8=mxfp8", "--precision.float8_all_gather=true"),
                "--activation_checkpoint.mode=full",
            ],
            'cannot be true with activation_checkpoint.mode = "full"; use auto or false',
        ),
        (
            [
                *("--precision.float8=mxfp8", "--precision.float8_all_gather=true"),
                "--parallel.reshard_after_forward=never",
            ],
            'cannot be true with parallel.reshard_after_forward = "never"; use auto or false',
        ),
        (
            ["--precision.float8=mxfp8", "--precision.float8_all_gather=true", "--parallel.pp=2"],
            "cannot be true with parallel.pp = 2; use auto or false",
        ),
        (
            [
                *("--precision.float8=mxfp8", "--parallel.tp=2", "--model.layer_pattern=['linear','full']"),
                *("--model.linear_attention.n_key_heads=2", "--model.linear_attention.n_value_heads=2"),
                *("--model.linear_attention.key_head_dim=32", "--model.linear_attention.value_head_dim=16"),
                *("--model.head_dim=64", "--model.n_kv_heads=2"),
            ],
            "leaves 16 features of attention.wv on each rank",
        ),
        (
            ["--precision.float8=mxfp8", "--train.seq_len=128", "--parallel.cp=2", "--model.attention=mla"],
            'attention.wkv_b to float8; add "*.wkv_b" to precision.float8_exclude, or use '
            "parallel.context = ring or ulysses",
        ),
        (
            ["--parallel.cpu_offload=true", "--parallel.data_parallel=ddp"],
            "needs parallel.data_parallel = fsdp2, but it is ddp",
        ),
        (
            [
                *("--model.layer_pattern=['linear','full']", "--precision.compute=bfloat16"),
                *("--model.linear_attention.n_key_heads=2", "--model.linear_attention.n_value_heads=2"),
                *("--model.linear_attention.key_head_dim=16", "--compile.enabled=true"),
                "--parallel.cpu_offload=true",
            ],
            "cannot keep the float32 decays of linear attention whole, as compile.enabled = true needs",
        ),
        (
            ["--parallel.pp=2", "--parallel.dp_shard=4", "--parallel.reshard_after_forward=2"],
            "cannot be a number with pipeline parallelism; use auto, always or never",
        ),
        (["--activation_checkpoint.mode=memory_budget"], "needs compile.enabled = true"),
        (
            [
                "--activation_checkpoint.mode=offload",
                '--activation_checkpoint.modules=["attention"]',
                "--compile.enabled=true",
            ],
            "must be [] with activation_checkpoint.mode = offload and compile.enabled = true",
        ),
        (
            [
                "--activation_checkpoint.mode=full",
                '--activation_checkpoint.modules=["attention"]',
                "--compile.enabled=true",
                "--parallel.tp=2",
                "--model.n_kv_heads=4",
            ],
            "must not list attention with mode = full, compile.enabled = true and parallel.tp > 1",
        ),
        (
            ["--model.moe.n_experts=8", "--parallel.tp=4", "--train.seq_len=30", "--model.n_kv_heads=4"],
            "train.seq_len = 30 (command line): must be a multiple of parallel.cp * parallel.tp",
        ),
        (
            [
                "--model.moe={n_experts = 8, n_shared_experts = 1, expert_dim = 6}",
                "--parallel.tp=4",
                "--model.n_kv_heads=4",
            ],
            "must divide model.moe.n_shared_experts * model.moe.expert_dim = 1 * 6",
        ),
    ],
)
def test_impossible_combinations_are_refused_with_a_remedy(tmp_path, overrides, part) -> None:
    assert part in complaint(tmp_path, *overrides)


def test_block_formats_pad_sequences_undivided_by_a_layout(tmp_path) -> None:
    options = ["--precision.float8=blockwise", "--train.seq_len=30", "--parallel.data_parallel=zero1"]
    assert load(tmp_path, *options).precision.float8_experts == "auto"


def test_keys_of_grouped_attention_mean_nothing_to_latent_attention(tmp_path) -> None:
    options = ["--model.attention=mla", "--model.n_kv_heads=3", "--model.head_dim=7", "--parallel.tp=4"]
    assert load(tmp_path, *options).model.latent is not None


def test_a_sequence_shorter_than_its_pieces_is_offered_one_length(tmp_path) -> None:
    line = complaint(tmp_path, "--model.moe.n_experts=8", "--parallel.tp=8", "--train.seq_len=4")
    assert line.endswith("use 8")


@pytest.mark.parametrize(("valid", "not_now"), [('"runs"', '"~/runs"'), ("qk_clip = 0.0", "qk_clip = 1.0")])
def test_a_stored_configuration_that_would_no_longer_start_can_be_opened(
    tmp_path, valid: str, not_now: str
) -> None:
    text = to_toml(load(tmp_path, *LINEAR, "--optimizer.name=muon"))
    assert text.count(valid) == 1
    text = text.replace(valid, not_now)
    assert parse_toml_text(text, stored=True)
    with pytest.raises(UserError):
        parse_toml_text(text)


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ('kind = "llama3"\nlow_freq_factor = 4.0', "model.rope_scaling.high_freq_factor"),
        ('kind = "yarn"\nbeta_fast = 1', "model.rope_scaling.beta_fast"),
    ],
)
def test_rope_scaling_needs_an_interval_of_frequencies(tmp_path, lines: str, key: str) -> None:
    assert f"{key} = " in complaint(tmp_path, text=TINY + ROPE + lines)


def test_rope_scaling_of_one_kind_ignores_the_keys_of_the_other(tmp_path) -> None:
    path = write(tmp_path, TINY + ROPE + 'kind = "yarn"\nlow_freq_factor = 9.0')
    assert load_config(["--config", path]).model.rope_scaling is not None


def test_head_dim_frees_dim_from_the_number_of_heads(tmp_path) -> None:
    assert load(tmp_path, "--model.dim=68", "--model.head_dim=16").model.head_dim == 16


def test_full_precision_and_pure_bfloat16_are_legal(tmp_path) -> None:
    for value in ("float64", "bfloat16"):
        load(tmp_path, *(f"--precision.{key}={value}" for key in ("storage", "compute", "reduce")))
    load(tmp_path, "--precision.compute=float64")


def test_a_run_may_end_within_its_warm_up(tmp_path) -> None:
    load(tmp_path, "--train.steps=2", "--schedule.warmup_steps=40")


@pytest.mark.parametrize(
    ("moe", "key", "says"),
    [
        ("n_experts = 6, n_expert_groups = 4", "n_expert_groups", "use one of 1, 2, 3, 6"),
        (
            "n_experts = 8, n_expert_groups = 4, n_limited_groups = 5",
            "n_limited_groups",
            "must be at most model.moe.n_expert_groups = 4",
        ),
        (
            "n_experts = 8, top_k = 5, n_expert_groups = 4, n_limited_groups = 2",
            "n_limited_groups",
            "at least 3",
        ),
        ("n_experts = 8, n_dense_layers = 99", "n_dense_layers", "must be at most model.n_layers"),
        (
            "n_experts = 8, balance = 'quantile', n_expert_groups = 4, n_limited_groups = 2",
            "balance",
            "use bias, or set model.moe.n_limited_groups = 0",
        ),
        ("n_experts = 2, top_k = 2, balance = 'quantile'", "balance", "use none, or lower model.moe.top_k"),
    ],
)
def test_invalid_groups_of_experts_are_refused(tmp_path, moe: str, key: str, says: str) -> None:
    line = complaint(tmp_path, f"--model.moe={{{moe}}}")
    assert line.startswith(f"model.moe.{key} = ") and says in line


def test_missing_expert_keys_follow_from_the_others(tmp_path) -> None:
    config = load(tmp_path, "--model.moe={n_experts = 8, n_expert_groups = 4}")
    assert config.model.moe.expert_dim == config.model.ffn_dim
    assert config.model.moe.n_limited_groups == 4
    load(tmp_path, "--model.moe={n_experts = 8, top_k = 4, n_expert_groups = 4, n_limited_groups = 2}")
