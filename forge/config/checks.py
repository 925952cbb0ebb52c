"""Invalid combinations of keys.

Each check yields sentences. A sentence begins with the key at fault, names every other key that takes part with its value
where it helps, and ends with a remedy: `model.n_kv_heads must divide model.n_heads = 8; use one of 1, 2, 4, 8`. A valid
value of a key that the chosen options do not use is ignored, so a check first asks whether its keys are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forge.config.keys import keys
from forge.config.optimizer import MuonConfig
from forge.config.phases import check_phases, variants
from forge.config.pipeline import SPLIT_BACKWARD, check_stages
from forge.config.schema import Config
from forge.runtime.errors import did_you_mean


def check(config: Config) -> list[str]:
    """Return every problem of a config whose keys are valid one by one."""
    first = (_heads, _layers, _tensor, _tensor_plan, _rope_scaling, _moe)
    then = (_engine, check_stages, _precision, _float8, _optimizer, _others)
    problems = [problem for one in (*first, *then) for problem in one(config)]
    of_phases = list(check_phases(config))
    return problems + of_phases + ([] if problems or of_phases else list(_each_phase(config)))


def _each_phase(config: Config) -> Iterator[str]:
    """Check what depends on the sizes of steps for those of each phase."""
    for number, variant in variants(config):
        for problem in (*_tensor(variant), *_float8(variant), *_others(variant)):
            yield f"{problem} (in phase {number})"


def divisors(number: int) -> str:
    """Return all divisors of `number`, for a message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` next to `number`, below (if positive) and above."""
    lower = number // unit * unit
    return " or ".join(str(n) for n in (lower, lower + unit) if n)


def _heads(config: Config) -> Iterator[str]:
    model = config.model
    if (mla := model.latent) is not None:
        if mla.qk_rope_head_dim % 2:
            even = f"use {mla.qk_rope_head_dim + 1}"
            yield f"model.mla.qk_rope_head_dim must be even, because RoPE rotates pairs; {even}"
        return
    if model.head_dim == 0:
        near = multiples(model.dim, model.n_heads)
        yield f"model.dim must be a multiple of {model.n_heads = }; use {near}, or set model.head_dim"
    elif model.head_dim % 2:
        default = f"model.dim / model.n_heads = {model.dim} / {model.n_heads}"
        even = f"use {model.head_dim + 1} (the default is {default})"
        yield f"model.head_dim must be even, because RoPE rotates pairs; {even}"
    elif model.rope_dim % 2 or abs(model.rope_dim - model.head_dim * model.rope_fraction) > 1e-6:
        share = f"{model.head_dim * model.rope_fraction:g} of {model.head_dim = }"
        whole = max(2, model.rope_dim // 2 * 2)
        yield f"model.rope_fraction rotates {share}, but RoPE rotates pairs; use {whole / model.head_dim:g}"
    if model.n_heads % model.n_kv_heads:
        yield f"model.n_kv_heads must divide {model.n_heads = }; use one of {divisors(model.n_heads)}"


def _layers(config: Config) -> Iterator[str]:
    model, pattern = config.model, config.model.layer_pattern
    if len(pattern) > model.n_layers:
        yield f"model.layer_pattern has {len(pattern)} kinds for {model.n_layers = }; leave some out"
    if "sliding" in pattern and not model.sliding_window:
        yield "model.layer_pattern has sliding layers, which need model.sliding_window; set it to their number of tokens"
    linear = model.linear_attention
    if "linear" in pattern and linear is None:
        yield "model.layer_pattern has linear layers, which need the table [model.linear_attention]; set its keys"
    if linear is None:
        return
    if "linear" not in pattern:
        yield 'model.linear_attention needs linear layers; put "linear" into model.layer_pattern, or leave the table out'
    if linear.n_value_heads % linear.n_key_heads:
        near = multiples(linear.n_value_heads, linear.n_key_heads)
        keys = f"model.linear_attention.n_key_heads = {linear.n_key_heads}"
        yield f"model.linear_attention.n_value_heads must be a multiple of {keys}; use {near}"


def _tensor(config: Config) -> Iterator[str]:
    parallel, model, train, tp = config.parallel, config.model, config.train, config.parallel.tp
    if tp == 1:
        return
    pieces = parallel.cp * tp
    product = f"a multiple of parallel.cp * parallel.tp = {parallel.cp} * {tp} = {pieces}"
    if train.seq_len % pieces:
        near = multiples(train.seq_len, pieces)
        if model.moe is not None:
            each = "because with model.moe each of these ranks routes a part of the sequence"
            yield f"train.seq_len must be {product}, {each}; use {near}"
        elif parallel.sequence_parallel:
            yield f"parallel.sequence_parallel needs {train.seq_len = } to be {product}; use {near}, or false"
    if -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        yield f"parallel.tp leaves a rank without a row of {model.vocab_size = }; use a smaller degree"
    if isinstance(parallel.reshard_after_forward, int) and parallel.data_parallel == "fsdp2":
        yield f"parallel.reshard_after_forward cannot be a number with {parallel.tp = }; use auto, always or never"
    if parallel.async_tp and not (config.compile.enabled and parallel.sequence_parallel):
        needed = "compile.enabled = true and parallel.sequence_parallel = true"
        yield f"parallel.async_tp needs {needed}, because the compiler does the overlap; set them, or use false"


def _tensor_plan(config: Config) -> Iterator[str]:
    parallel, model, tp = config.parallel, config.model, config.parallel.tp
    if tp > 1 and parallel.tp_plan != "auto" and parallel.tp_plan_styles:
        yield "parallel.tp_plan cannot be combined with parallel.tp_plan_styles, which is a plan too; leave one out"
    if tp == 1 or parallel.tp_plan != "auto" or parallel.tp_plan_styles:
        return
    shared = {"n_heads": "query heads", "n_kv_heads": "key/value heads", "ffn_dim": "features"}
    if model.latent is not None:
        del shared["n_kv_heads"]
    if model.moe is not None and not model.moe.n_dense_layers and model.moe.every == 1:
        del shared["ffn_dim"]
    if set(model.pattern) == {"linear"}:
        shared = {key: what for key, what in shared.items() if key == "ffn_dim"}
    sizes = {key: (getattr(model, key), what) for key, what in shared.items()}
    if model.linear_attention is not None and "linear" in model.pattern:
        sizes["linear_attention.n_key_heads"] = model.linear_attention.n_key_heads, "key heads"
    for key, (size, what) in sizes.items():
        if size % tp:
            yield f"parallel.tp must divide model.{key} = {size}, the {what} that it splits; use {divisors(size)}"
    number, dim = (model.moe.n_shared_experts, model.moe.expert_dim) if model.moe else (0, 0)
    if number * dim % tp:
        features = f"model.moe.n_shared_experts * model.moe.expert_dim = {number} * {dim}"
        yield f"parallel.tp must divide {features}, the features that it splits; use {divisors(number * dim)}"


def _rope_scaling(config: Config) -> Iterator[str]:
    scaling, section = config.model.rope_scaling, "model.rope_scaling"
    if scaling is not None:
        if scaling.kind == "linear":
            return
        if not scaling.original_max_position:
            remedy = "set it to the context that the model was trained with"
            yield f"{section}.original_max_position must be above 0 with {section}.kind = {scaling.kind}; {remedy}"
        pairs = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
        upper, lower = pairs[scaling.kind]
        if getattr(scaling, upper) <= getattr(scaling, lower):
            yield f"{section}.{upper} must be greater than {section}.{lower} = {getattr(scaling, lower)}"


def _moe(config: Config) -> Iterator[str]:
    model, moe = config.model, config.model.moe
    if moe is None or model.moe is None:
        return
    if moe.top_k > moe.n_experts:
        yield f"model.moe.top_k must be at most {model.moe.n_experts = }"
    if moe.n_experts % moe.n_expert_groups:
        remedy = f"use one of {divisors(moe.n_experts)}"
        yield f"model.moe.n_expert_groups must divide {model.moe.n_experts = }; {remedy}"
    elif moe.n_limited_groups > moe.n_expert_groups:
        yield f"model.moe.n_limited_groups must be at most {model.moe.n_expert_groups = }; use 0 for all of them"
    elif moe.top_k <= moe.n_experts < moe.top_k * moe.n_expert_groups / moe.n_limited_groups:
        size = moe.n_experts // moe.n_expert_groups
        remedy = f"fewer than {model.moe.top_k = }; use at least {-(-moe.top_k // size)}"
        experts = f"{moe.n_limited_groups} of {model.moe.n_expert_groups = } groups of {size} experts"
        yield f"model.moe.n_limited_groups leaves {experts}, {remedy}"
    if moe.n_dense_layers > model.n_layers:
        yield f"model.moe.n_dense_layers must be at most {model.n_layers = }"
    elif moe.every > 1 and model.n_layers // moe.every * moe.every <= moe.n_dense_layers:
        after = f" with {model.moe.n_dense_layers = }" if moe.n_dense_layers else ""
        yield f"model.moe.every leaves none of {model.n_layers = } layers with experts{after}; use a smaller number"


def _engine(config: Config) -> Iterator[str]:
    parallel, pipeline, engine = config.parallel, config.pipeline, config.parallel.data_parallel
    fsdp2 = f"needs parallel.data_parallel = fsdp2, but it is {engine}"
    if parallel.shard_optimizer_over == "dp" and engine not in ("zero1", "zero2"):
        zero = f"needs parallel.data_parallel = zero1 or zero2, but it is {engine}"
        yield f"parallel.shard_optimizer_over {zero}; use dp_shard, or zero1 or zero2"
    if engine != "fsdp2" and config.precision.float8 != "none":
        yield f"precision.float8 {fsdp2}, whose buffers cannot hold float8; use none, or fsdp2"
    if engine != "fsdp2" and parallel.cpu_offload:
        yield f"parallel.cpu_offload {fsdp2}; use false, or fsdp2"
    frees = engine == "fsdp2" and parallel.reshard_after_forward not in ("auto", "never")
    if parallel.pp > 1 and pipeline.schedule in SPLIT_BACKWARD and frees:
        later = f"whose gradients {pipeline.schedule = !s} computes later"
        yield f"parallel.reshard_after_forward would free parameters {later}; use auto or never"


def _precision(config: Config) -> Iterator[str]:
    for key in ("storage", "reduce"):
        if config.precision.compute == "float64" and getattr(config.precision, key) == "bfloat16":
            yield f"precision.{key} would round what precision.compute = float64 computes; use float64 or float32"


def _float8(config: Config) -> Iterator[str]:
    precision, train, parallel = config.precision, config.train, config.parallel
    if precision.float8 == "none":
        return
    gather = "precision.float8_all_gather cannot be true with"
    if precision.float8_all_gather is True and parallel.tp > 1:
        yield f"{gather} {parallel.tp = }; use auto or false"
    if precision.float8_all_gather is True and precision.float8 == "rowwise":
        yield f"{gather} precision.float8 = rowwise, which needs whole rows to scale; use auto or false"
    if train.micro_batch_size * train.seq_len % (16 * parallel.cp):
        numbers = f"{train.micro_batch_size} * {train.seq_len} / {parallel.cp}"
        tokens = f"train.micro_batch_size * train.seq_len / parallel.cp = {numbers}"
        yield f"precision.float8 needs 16 to divide the tokens of a microbatch, {tokens}; use another train.seq_len"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, default = config.optimizer, MuonConfig()
    if optimizer.moment_dtype == "int8" and optimizer.name in ("lion", "muon"):
        yield f"optimizer.moment_dtype = int8 needs optimizer.name = adamw, but it is {optimizer.name}; use bfloat16"
    if config.compile.optimizer and optimizer.name != "adamw":
        yield f"compile.optimizer needs optimizer.name = adamw, but it is {optimizer.name}; use false"
    if config.compile.optimizer and optimizer.moment_dtype == "int8":
        yield "compile.optimizer does not go with optimizer.moment_dtype = int8; use bfloat16, or false"
    if optimizer.parametrization != "standard":
        used = {"base_dim": "model.dim", "base_depth": "model.n_layers"}
        for key in list(used)[: 2 if optimizer.parametrization == "completep" else 1]:
            if not getattr(optimizer.mup, key):
                chosen = f"the {used[key]} of the model that optimizer.lr was chosen with"
                yield f"optimizer.mup.{key} must be above 0 with {optimizer.parametrization = !s}; set it to {chosen}"
    if optimizer.name == "muon":
        if optimizer.muon.qk_clip and config.model.qk_norm and config.model.latent is None:
            undone = "whose norms undo every scale of the projections, and bound logits themselves"
            yield f"optimizer.muon.qk_clip has no effect with model.qk_norm = true, {undone}; use 0, or model.qk_norm = false"
        return
    # A table of another optimizer, like those of users' own, is a mistake; as long as it has values, that is.
    for key, value in optimizer.muon:
        if value != getattr(default, key):
            yield (
                f"optimizer.muon.{key} needs optimizer.name = muon, but it is {optimizer.name}; set it, or leave the "
                "table [optimizer.muon] out"
            )


def _others(config: Config) -> Iterator[str]:
    if config.model.mtp is not None and config.model.mtp.depth >= config.train.seq_len:
        yield f"model.mtp.depth must be less than {config.train.seq_len = !s}, so that there is a token to predict; lower it"
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enabled:
        yield "activation_checkpoint.mode needs compile.enabled = true, which does it; set it, or use selective"
    if not any(source.weight for source in config.data.sources):
        yield "data.sources has no source with a weight > 0; set at least one"
    names = Counter(source.name for source in config.data.validation)
    if twice := [name for name, number in names.items() if number > 1]:
        yield f"data.validation has more than one source named {', '.join(twice)}; give each name once"
    model_keys = [name for name in keys(type(config)) if name.startswith("model.")]
    for name in config.checkpoint.init_changes:
        if name not in model_keys:
            hint = did_you_mean(name, model_keys)
            yield f'checkpoint.init_changes has "{name}", which is no key of [model]{hint or "; use such as model.norm_eps"}'
    resume = config.checkpoint.resume
    if config.checkpoint.init and resume not in ("auto", "none"):
        yield f'checkpoint.init begins a new history, but checkpoint.resume = "{resume}" continues one; leave one out'
