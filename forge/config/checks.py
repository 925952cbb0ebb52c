"""What one key alone cannot get wrong: combinations of keys.

A valid value of a key that the chosen options do not use is ignored: a check first asks if its keys count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forge.config.messages import Problem, divisors, multiples
from forge.config.pipeline import SPLIT_BACKWARD, check_stages
from forge.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Everything wrong with a config whose keys are valid by themselves."""
    checks = (_heads, _tensor, _rope_scaling, _moe, _engine, _pipeline, _precision, _others)
    return [problem for one in checks for problem in one(config)]


def _heads(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.head_dim == 0:
        near = multiples(model.dim, model.n_heads)
        yield Problem(
            ("model.dim", "model.n_heads", "model.head_dim"),
            f"is not a multiple of model.n_heads = {model.n_heads}; use {near}, or set model.head_dim",
        )
    elif model.head_dim % 2:
        yield Problem(
            ("model.head_dim", "model.dim", "model.n_heads"),
            f"must be even, because RoPE rotates pairs; use {model.head_dim + 1}"
            f" (without the key it is model.dim / model.n_heads = {model.dim} / {model.n_heads})",
        )
    if model.n_heads % model.n_kv_heads:
        yield Problem(
            ("model.n_kv_heads", "model.n_heads"),
            f"must divide model.n_heads = {model.n_heads}; use one of {divisors(model.n_heads)}",
        )


def _tensor(config: Config) -> Iterator[Problem]:
    parallel, model, tp = config.parallel, config.model, config.parallel.tp
    if tp == 1:
        return
    if parallel.tp_plan == "auto" and not parallel.tp_plan_styles:
        shared = [("n_heads", "query heads"), ("n_kv_heads", "key/value heads")]
        moe = model.moe
        if moe is None or moe.n_dense_layers:
            shared.append(("ffn_dim", "features"))
        for key, what in shared:
            size = getattr(model, key)
            if size % tp:
                yield Problem(
                    ("parallel.tp", f"model.{key}"),
                    f"must divide model.{key} = {size}, whose {what} the ranks share; use {divisors(size)}",
                )
        if moe is not None and moe.n_shared_experts * moe.expert_dim % tp:
            yield Problem(
                ("parallel.tp", "model.moe.n_shared_experts", "model.moe.expert_dim"),
                f"must divide n_shared_experts * expert_dim = {moe.n_shared_experts} * {moe.expert_dim}, the features of "
                f"the shared experts; use {divisors(moe.n_shared_experts * moe.expert_dim)}",
            )
    if parallel.tp_plan != "auto" and parallel.tp_plan_styles:
        yield Problem(
            ("parallel.tp_plan", "parallel.tp_plan_styles"),
            "is a plan, and parallel.tp_plan_styles is another; leave one out",
        )
    pieces, seq_len = parallel.cp * tp, config.train.seq_len
    if model.moe is not None and seq_len % pieces:
        yield Problem(
            ("train.seq_len", "parallel.tp", "parallel.cp", "model.moe"),
            f"must be a multiple of cp * tp = {parallel.cp} * {tp} = {pieces}, whose ranks each route a piece of the "
            f"sequence; use {multiples(seq_len, pieces)}",
        )
    elif parallel.sequence_parallel and seq_len % pieces:
        yield Problem(
            ("parallel.sequence_parallel", "parallel.tp", "parallel.cp", "train.seq_len"),
            f"needs train.seq_len = {seq_len} to be a multiple of cp * tp = {parallel.cp} * {tp} = {pieces}; use "
            f"{multiples(seq_len, pieces)}, or false",
        )
    if -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        yield Problem(
            ("parallel.tp", "model.vocab_size"),
            f"leaves a rank without a row of model.vocab_size = {model.vocab_size}; use a smaller degree",
        )
    if isinstance(parallel.reshard_after_forward, int) and parallel.data_parallel == "fsdp2":
        yield Problem(
            ("parallel.reshard_after_forward", "parallel.tp"),
            f"cannot be a number with parallel.tp = {tp}; use auto, always or never",
        )
    if parallel.async_tp and not (config.compile.enabled and parallel.sequence_parallel):
        yield Problem(
            ("parallel.async_tp", "compile.enabled", "parallel.sequence_parallel"),
            "is the compiler's work on all-gathers and reduce-scatters; set compile.enabled = true and "
            "parallel.sequence_parallel = true, or leave it false",
        )


def _rope_scaling(config: Config) -> Iterator[Problem]:
    scaling, section = config.model.rope_scaling, "model.rope_scaling"
    if scaling is None:
        return
    pairs = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    upper, lower = pairs[scaling.kind]
    if getattr(scaling, upper) <= getattr(scaling, lower):
        yield Problem(
            (f"{section}.{upper}", f"{section}.{lower}"),
            f"must be greater than {section}.{lower} = {getattr(scaling, lower)}",
        )


def _moe(config: Config) -> Iterator[Problem]:
    moe = config.model.moe
    if moe is None:
        return
    if moe.top_k > moe.n_experts:
        yield Problem(
            ("model.moe.top_k", "model.moe.n_experts"), f"is more than model.moe.n_experts = {moe.n_experts}"
        )
    if moe.n_experts % moe.n_expert_groups:
        yield Problem(
            ("model.moe.n_expert_groups", "model.moe.n_experts"),
            f"must divide model.moe.n_experts = {moe.n_experts}; use one of {divisors(moe.n_experts)}",
        )
    elif moe.n_limited_groups > moe.n_expert_groups:
        yield Problem(
            ("model.moe.n_limited_groups", "model.moe.n_expert_groups"),
            f"is more than model.moe.n_expert_groups = {moe.n_expert_groups}; use 0 for all of them",
        )
    elif moe.top_k <= moe.n_experts < moe.top_k * moe.n_expert_groups / moe.n_limited_groups:
        size = moe.n_experts // moe.n_expert_groups
        yield Problem(
            ("model.moe.n_limited_groups", "model.moe.top_k", "model.moe.n_expert_groups"),
            f"leaves {moe.n_limited_groups} groups of {size} experts, fewer than model.moe.top_k = {moe.top_k}; use at "
            f"least {-(-moe.top_k // size)}",
        )
    if moe.n_dense_layers > config.model.n_layers:
        yield Problem(
            ("model.moe.n_dense_layers", "model.n_layers"),
            f"is more than model.n_layers = {config.model.n_layers}",
        )


def _engine(config: Config) -> Iterator[Problem]:
    parallel, engine = config.parallel, config.parallel.data_parallel
    if parallel.shard_optimizer_over == "dp" and engine not in ("zero1", "zero2"):
        yield Problem(
            ("parallel.shard_optimizer_over", "parallel.data_parallel"),
            f"is for zero1 and zero2, but parallel.data_parallel = {engine}; use dp_shard, or one of them",
        )
    if engine == "fsdp2":
        return
    if config.precision.float8 != "none":
        yield Problem(
            ("precision.float8", "parallel.data_parallel"),
            f"needs parallel.data_parallel = fsdp2, but it is {engine}, whose buffers do not hold float8; use none, or fsdp2",
        )
    if parallel.cpu_offload:
        yield Problem(
            ("parallel.cpu_offload", "parallel.data_parallel"),
            f"needs parallel.data_parallel = fsdp2, but it is {engine}; use false, or fsdp2",
        )


def _pipeline(config: Config) -> Iterator[Problem]:
    yield from check_stages(config)
    parallel, schedule = config.parallel, config.pipeline.schedule
    kept = parallel.reshard_after_forward in ("auto", "never") or parallel.data_parallel != "fsdp2"
    if parallel.pp > 1 and schedule in SPLIT_BACKWARD and not kept:
        yield Problem(
            ("parallel.reshard_after_forward", "pipeline.schedule"),
            f"would free parameters whose gradients pipeline.schedule = {schedule} computes later; use auto or never",
        )


def _precision(config: Config) -> Iterator[Problem]:
    precision, train, parallel = config.precision, config.train, config.parallel
    for key in ("storage", "reduce"):
        if precision.compute == "float64" and getattr(precision, key) == "bfloat16":
            yield Problem(
                (f"precision.{key}", "precision.compute"),
                "throws away what precision.compute = float64 computes; use float64 or float32",
            )
    if precision.float8 == "none":
        return
    if precision.float8_all_gather is True and parallel.tp > 1:
        yield Problem(
            ("precision.float8_all_gather", "parallel.tp", "precision.float8"),
            f"does not go with parallel.tp = {parallel.tp}; use auto or false",
        )
    if precision.float8_all_gather is True and precision.float8 == "rowwise":
        yield Problem(
            ("precision.float8_all_gather", "precision.float8"),
            "does not go with precision.float8 = rowwise, which needs whole rows to scale; use auto or false",
        )
    tokens = train.micro_batch_size * train.seq_len
    if tokens % (16 * parallel.cp):
        yield Problem(
            ("precision.float8", "train.micro_batch_size", "train.seq_len", "parallel.cp"),
            "needs a multiple of 16 tokens in each microbatch of a rank, but micro_batch_size * seq_len / cp ="
            f" {train.micro_batch_size} * {train.seq_len} / {parallel.cp}; use another train.seq_len",
        )


def _others(config: Config) -> Iterator[Problem]:
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enabled:
        yield Problem(
            ("activation_checkpoint.mode", "compile.enabled"),
            "is the compiler's choice and needs compile.enabled = true; set it, or use selective",
        )
    if not sum(source.weight for source in config.data.sources) > 0:
        yield Problem(("data.sources",), "all weights are 0; give at least one source a weight > 0")
    names = Counter(source.name for source in config.data.validation)
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        yield Problem(("data.validation",), f"every name once, but there is more than one {', '.join(twice)}")
    checkpoint = config.checkpoint
    if checkpoint.init and checkpoint.resume not in ("auto", "none"):
        yield Problem(
            ("checkpoint.init", "checkpoint.resume"),
            f"begins a new history, checkpoint.resume = {checkpoint.resume!r} continues one; leave one out",
        )
