"""Invalid combinations of keys.

Each check yields sentences. A sentence begins with the key at fault, names every other key that takes part with its value
where it helps, and ends with a remedy: `model.n_kv_heads must divide model.n_heads = 8; use one of 1, 2, 4, 8`. A valid
value of a key that the chosen options do not use is ignored, so a check first asks whether its keys are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forge.config.pipeline import SPLIT_BACKWARD, check_stages
from forge.config.schema import Config


def check(config: Config) -> list[str]:
    """Every problem of a config whose keys are valid one by one."""
    checks = (
        _heads,
        _tensor,
        _tensor_plan,
        _rope_scaling,
        _moe,
        _engine,
        check_stages,
        _precision,
        _float8,
        _others,
    )
    return [problem for one in checks for problem in one(config)]


def divisors(number: int) -> str:
    """All divisors of `number`, for a message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`, below (if positive) and above."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def _heads(config: Config) -> Iterator[str]:
    model = config.model
    if model.head_dim == 0:
        near = multiples(model.dim, model.n_heads)
        yield f"model.dim must be a multiple of model.n_heads = {model.n_heads}; use {near}, or set model.head_dim"
    elif model.head_dim % 2:
        yield (
            f"model.head_dim must be even, because RoPE rotates pairs; use {model.head_dim + 1} (the default is "
            f"model.dim / model.n_heads = {model.dim} / {model.n_heads})"
        )
    if model.n_heads % model.n_kv_heads:
        yield f"model.n_kv_heads must divide model.n_heads = {model.n_heads}; use one of {divisors(model.n_heads)}"


def _tensor(config: Config) -> Iterator[str]:
    parallel, model, tp = config.parallel, config.model, config.parallel.tp
    if tp == 1:
        return
    pieces, seq_len = parallel.cp * tp, config.train.seq_len
    product = f"parallel.cp * parallel.tp = {parallel.cp} * {tp} = {pieces}"
    if model.moe is not None and seq_len % pieces:
        yield (
            f"train.seq_len must be a multiple of {product}, because with model.moe each of these ranks routes a part of "
            f"the sequence; use {multiples(seq_len, pieces)}"
        )
    elif parallel.sequence_parallel and seq_len % pieces:
        near = multiples(seq_len, pieces)
        yield (
            f"parallel.sequence_parallel needs train.seq_len = {seq_len} to be a multiple of {product}; use {near}, or false"
        )
    if -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        yield f"parallel.tp leaves a rank without a row of model.vocab_size = {model.vocab_size}; use a smaller degree"
    if isinstance(parallel.reshard_after_forward, int) and parallel.data_parallel == "fsdp2":
        yield (
            f"parallel.reshard_after_forward cannot be a number with parallel.tp = {tp}; use auto, always or never"
        )
    if parallel.async_tp and not (config.compile.enabled and parallel.sequence_parallel):
        yield (
            "parallel.async_tp is done by the compiler, on all-gathers and reduce-scatters; set compile.enabled = true and "
            "parallel.sequence_parallel = true, or leave it false"
        )


def _tensor_plan(config: Config) -> Iterator[str]:
    parallel, model, tp = config.parallel, config.model, config.parallel.tp
    if tp > 1 and parallel.tp_plan != "auto" and parallel.tp_plan_styles:
        yield "parallel.tp_plan cannot be combined with parallel.tp_plan_styles, which is a plan too; leave one out"
    if tp == 1 or parallel.tp_plan != "auto" or parallel.tp_plan_styles:
        return
    shared = {"n_heads": "query heads", "n_kv_heads": "key/value heads", "ffn_dim": "features"}
    if model.moe is not None and not model.moe.n_dense_layers:
        del shared["ffn_dim"]
    for key, what in shared.items():
        size = getattr(model, key)
        if size % tp:
            yield f"parallel.tp must divide model.{key} = {size}, the {what} that its ranks share; use {divisors(size)}"
    if model.moe is not None and model.moe.n_shared_experts * model.moe.expert_dim % tp:
        number, dim = model.moe.n_shared_experts, model.moe.expert_dim
        yield (
            f"parallel.tp must divide model.moe.n_shared_experts * model.moe.expert_dim = {number} * {dim}, the features "
            f"of the shared experts; use {divisors(number * dim)}"
        )


def _rope_scaling(config: Config) -> Iterator[str]:
    scaling, section = config.model.rope_scaling, "model.rope_scaling"
    if scaling is not None:
        pairs = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
        upper, lower = pairs[scaling.kind]
        if getattr(scaling, upper) <= getattr(scaling, lower):
            yield f"{section}.{upper} must be greater than {section}.{lower} = {getattr(scaling, lower)}"


def _moe(config: Config) -> Iterator[str]:
    moe, section = config.model.moe, "model.moe"
    if moe is None:
        return
    experts, groups, limited = moe.n_experts, moe.n_expert_groups, moe.n_limited_groups
    if moe.top_k > experts:
        yield f"{section}.top_k must be at most {section}.n_experts = {experts}"
    if experts % groups:
        yield f"{section}.n_expert_groups must divide {section}.n_experts = {experts}; use one of {divisors(experts)}"
    elif limited > groups:
        yield f"{section}.n_limited_groups must be at most {section}.n_expert_groups = {groups}; use 0 for all of them"
    elif moe.top_k <= experts < moe.top_k * groups / limited:
        size = experts // groups
        yield (
            f"{section}.n_limited_groups leaves {limited} of {section}.n_expert_groups = {groups} groups with {size} experts "
            f"each, fewer than {section}.top_k = {moe.top_k}; use at least {-(-moe.top_k // size)}"
        )
    if moe.n_dense_layers > config.model.n_layers:
        yield f"{section}.n_dense_layers must be at most model.n_layers = {config.model.n_layers}"


def _engine(config: Config) -> Iterator[str]:
    parallel, engine = config.parallel, config.parallel.data_parallel
    fsdp2, schedule = f"parallel.data_parallel = fsdp2, but it is {engine}", config.pipeline.schedule
    if parallel.shard_optimizer_over == "dp" and engine not in ("zero1", "zero2"):
        yield (
            f"parallel.shard_optimizer_over can be dp only with zero1 and zero2, but parallel.data_parallel = {engine}; use "
            "dp_shard, or one of these"
        )
    if engine != "fsdp2" and config.precision.float8 != "none":
        yield f"precision.float8 needs {fsdp2}, whose buffers cannot hold float8; use none, or fsdp2"
    if engine != "fsdp2" and parallel.cpu_offload:
        yield f"parallel.cpu_offload needs {fsdp2}; use false, or fsdp2"
    frees = engine == "fsdp2" and parallel.reshard_after_forward not in ("auto", "never")
    if parallel.pp > 1 and schedule in SPLIT_BACKWARD and frees:
        yield (
            f"parallel.reshard_after_forward would free parameters whose gradients pipeline.schedule = {schedule} computes "
            "later; use auto or never"
        )


def _precision(config: Config) -> Iterator[str]:
    for key in ("storage", "reduce"):
        if config.precision.compute == "float64" and getattr(config.precision, key) == "bfloat16":
            yield f"precision.{key} would round what precision.compute = float64 computes; use float64 or float32"


def _float8(config: Config) -> Iterator[str]:
    precision, train, parallel = config.precision, config.train, config.parallel
    if precision.float8 == "none":
        return
    if precision.float8_all_gather is True and parallel.tp > 1:
        yield f"precision.float8_all_gather cannot be combined with parallel.tp = {parallel.tp}; use auto or false"
    if precision.float8_all_gather is True and precision.float8 == "rowwise":
        yield (
            "precision.float8_all_gather cannot be combined with precision.float8 = rowwise, which needs whole rows to "
            "scale; use auto or false"
        )
    if train.micro_batch_size * train.seq_len % (16 * parallel.cp):
        yield (
            "precision.float8 needs a multiple of 16 tokens in each microbatch of a rank, but train.micro_batch_size * "
            f"train.seq_len / parallel.cp = {train.micro_batch_size} * {train.seq_len} / {parallel.cp}; use another "
            "train.seq_len"
        )


def _others(config: Config) -> Iterator[str]:
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enabled:
        yield "activation_checkpoint.mode needs compile.enabled = true, which does it; set it, or use selective"
    if not any(source.weight for source in config.data.sources):
        yield "data.sources has no source with a weight > 0; set at least one"
    names = Counter(source.name for source in config.data.validation)
    if twice := [name for name, number in names.items() if number > 1]:
        yield f"data.validation has more than one source named {', '.join(twice)}; give each name once"
    resume = config.checkpoint.resume
    if config.checkpoint.init and resume not in ("auto", "none"):
        yield f'checkpoint.init begins a new history, but checkpoint.resume = "{resume}" continues one; leave one out'
