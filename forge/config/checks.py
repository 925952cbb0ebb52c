"""Invalid combinations of keys.

Each check yields `Problem`s, e.g. `model.n_kv_heads = 3: must divide model.n_heads = 8; use one of 1, 2, 4, 8`. Checks
ignore keys without effect under the chosen options: these may have any valid value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from forge.config.float8 import check_float8
from forge.config.keys import keys
from forge.config.optimizer import MuonConfig
from forge.config.phase_checks import check_phases, check_ramps
from forge.config.phases import variants
from forge.config.pipeline import SPLIT_BACKWARD, check_stages
from forge.config.problem import Problem, multiples, problem, with_values
from forge.config.schema import Config
from forge.runtime.errors import nearest
from forge.runtime.files import is_url, why_not_local

EVEN = "must be even, because RoPE rotates pairs of features"


def check(config: Config, stored: bool = False) -> list[Problem]:
    """Return every problem of `config`. If there is none, also check the sizes of each phase.

    Each key must already be valid by itself. stored: `config` belongs to a run that has started, perhaps with an older
    version. Allow what would no longer start, but can be opened.
    """
    first = (_heads, _layers, _tensor, _tensor_plan, _rope_scaling, _moe)
    then = (_engine, check_stages, _precision, check_float8, _optimizer, _others, check_phases)
    new = () if stored else (_folders, _ineffective, check_ramps)
    found = with_values((one for some in (*first, *then, *new) for one in some(config)), config)
    return found or list(_each_phase(config))


def _each_phase(config: Config) -> Iterator[Problem]:
    """Yield a problem for each rule that the batch size or sequence length of a phase violates."""
    for number, variant in variants(config):
        yield from with_values(
            (*_tensor(variant), *check_float8(variant), *_others(variant)), variant, number
        )


def divisors(number: int) -> str:
    """Return the divisors of `number` up to 2^16 as text for a message."""
    return ", ".join(str(n) for n in range(1, min(number, 2**16) + 1) if number % n == 0)


def _heads(config: Config) -> Iterator[Problem]:
    model = config.model
    if (mla := model.latent) is not None:
        if mla.qk_rope_head_dim % 2:
            yield problem("model.mla.qk_rope_head_dim", EVEN, f"use {mla.qk_rope_head_dim + 1}")
        return
    if model.head_dim == 0:
        remedy = f"use {multiples(model.dim, model.n_heads)}, or set model.head_dim"
        others = "model.n_heads", "model.head_dim"
        yield problem("model.dim", f"must be a multiple of {model.n_heads = }", remedy, *others)
    elif model.head_dim % 2:
        default = f"the default is model.dim / model.n_heads = {model.dim} / {model.n_heads}"
        remedy = f"use {model.head_dim + 1} ({default})"
        yield problem("model.head_dim", EVEN, remedy, "model.dim", "model.n_heads")
    elif model.rope_dim % 2 or abs(model.rope_dim - model.head_dim * model.rope_fraction) > 1e-6:
        share = f"rotates {model.head_dim * model.rope_fraction:g} of {model.head_dim = } features, but RoPE rotates pairs"
        whole = max(2, model.rope_dim // 2 * 2)
        yield problem("model.rope_fraction", share, f"use {whole / model.head_dim:g}", "model.head_dim")
    if model.n_heads % model.n_kv_heads:
        remedy = f"use one of {divisors(model.n_heads)}"
        yield problem("model.n_kv_heads", f"must divide {model.n_heads = }", remedy, "model.n_heads")


def _layers(config: Config) -> Iterator[Problem]:
    model, pattern = config.model, config.model.layer_pattern
    if len(pattern) > model.n_layers:
        many = f"has {len(pattern)} entries, more than {model.n_layers = }"
        yield problem("model.layer_pattern", many, "leave some out", "model.n_layers")
    if "sliding" in pattern and not model.sliding_window:
        needed, remedy = (
            "which need model.sliding_window",
            "set model.sliding_window to the number of tokens in a window",
        )
        yield problem("model.layer_pattern", f"has sliding layers, {needed}", remedy, "model.sliding_window")
    linear, table = model.linear_attention, "model.linear_attention"
    if "linear" in pattern and linear is None:
        needed = "has linear layers, which need the table [model.linear_attention]"
        yield problem("model.layer_pattern", needed, "set its keys", table)
    if linear is None:
        return
    if "linear" not in pattern:
        remedy = 'put "linear" into model.layer_pattern, or leave the table out'
        yield problem(table, "needs linear layers", remedy, "model.layer_pattern")
    if linear.n_value_heads % linear.n_key_heads:
        remedy = f"use {multiples(linear.n_value_heads, linear.n_key_heads)}"
        key = f"{table}.n_key_heads"
        unit = f"must be a multiple of {key} = {linear.n_key_heads}"
        yield problem(f"{table}.n_value_heads", unit, remedy, key)


def _tensor(config: Config) -> Iterator[Problem]:
    parallel, model, train, tp = config.parallel, config.model, config.train, config.parallel.tp
    if tp == 1:
        return
    pieces, degrees = parallel.cp * tp, ("parallel.cp", "parallel.tp")
    product = f"a multiple of parallel.cp * parallel.tp = {parallel.cp} * {tp} = {pieces}"
    if train.seq_len % pieces:
        near = multiples(train.seq_len, pieces)
        if model.moe is not None:
            each = f"because with model.moe each of the {pieces} ranks routes a part of the sequence"
            yield problem("train.seq_len", f"must be {product}, {each}", f"use {near}", *degrees, "model.moe")
        elif parallel.sequence_parallel:
            key, needed = "parallel.sequence_parallel", f"needs {train.seq_len = } to be {product}"
            yield problem(key, needed, f"set train.seq_len = {near}, or use false", *degrees, "train.seq_len")
    if -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        few = f"is too large: with {model.vocab_size = }, the last tp rank would get no row of the embedding"
        yield problem("parallel.tp", few, "use a smaller degree", "model.vocab_size")
    if isinstance(parallel.reshard_after_forward, int) and parallel.data_parallel == "fsdp2":
        key, remedy = "parallel.reshard_after_forward", "use auto, always or never"
        yield problem(key, f"cannot be a number with {parallel.tp = }", remedy, "parallel.tp")
    if parallel.async_tp and not (config.compile.enabled and parallel.sequence_parallel):
        needed = "needs compile.enabled = true and parallel.sequence_parallel = true"
        reason, others = (
            "because the compiler does the overlap",
            ("compile.enabled", "parallel.sequence_parallel"),
        )
        yield problem("parallel.async_tp", f"{needed}, {reason}", "set both keys, or use false", *others)


def _tensor_plan(config: Config) -> Iterator[Problem]:
    parallel, model, tp = config.parallel, config.model, config.parallel.tp
    if tp == 1 or parallel.tp_plan != "auto":
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
            whole = f"must divide model.{key} = {size}, because every tp rank needs the same number of {what}"
            yield problem("parallel.tp", whole, f"use one of {divisors(size)}", f"model.{key}")
    number, dim = (model.moe.n_shared_experts, model.moe.expert_dim) if model.moe else (0, 0)
    if number * dim % tp:
        others = "model.moe.n_shared_experts", "model.moe.expert_dim"
        product = f"{' * '.join(others)} = {number} * {dim}"
        whole = f"must divide {product}, because every tp rank needs the same number of features"
        yield problem("parallel.tp", whole, f"use one of {divisors(number * dim)}", *others)


def _rope_scaling(config: Config) -> Iterator[Problem]:
    scaling, section = config.model.rope_scaling, "model.rope_scaling"
    if scaling is None or scaling.kind == "linear":
        return
    kind = f"{section}.kind"
    if not scaling.original_max_position:
        remedy = "set it to the model's original training context"
        least = f"must be above 0 with {kind} = {scaling.kind}"
        yield problem(f"{section}.original_max_position", least, remedy, kind)
    pairs = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    upper, lower = pairs[scaling.kind]
    if getattr(scaling, upper) <= getattr(scaling, lower):
        other = f"{section}.{lower}"
        yield problem(
            f"{section}.{upper}", f"must be greater than {other} = {getattr(scaling, lower)}", "", other, kind
        )


def _moe(config: Config) -> Iterator[Problem]:
    model, moe = config.model, config.model.moe
    if moe is None or model.moe is None:
        return
    if moe.top_k > moe.n_experts:
        yield problem(
            "model.moe.top_k", f"must be at most {model.moe.n_experts = }", "", "model.moe.n_experts"
        )
    key = "model.moe.n_limited_groups"
    if moe.n_experts % moe.n_expert_groups:
        groups, whole = "model.moe.n_expert_groups", f"must divide {model.moe.n_experts = }"
        yield problem(groups, whole, f"use one of {divisors(moe.n_experts)}", "model.moe.n_experts")
    elif moe.n_limited_groups > moe.n_expert_groups:
        most = f"must be at most {model.moe.n_expert_groups = }"
        yield problem(key, most, "use 0 for all groups", "model.moe.n_expert_groups")
    elif moe.top_k <= moe.n_experts < moe.top_k * moe.n_expert_groups / moe.n_limited_groups:
        size = moe.n_experts // moe.n_expert_groups
        experts = f"{moe.n_limited_groups * size} experts to choose from ({size} in each group)"
        few = f"leaves each token only {experts}, fewer than {model.moe.top_k = }"
        remedy = f"use at least {-(-moe.top_k // size)}"
        yield problem(
            key, few, remedy, *(f"model.moe.{name}" for name in ("n_expert_groups", "n_experts", "top_k"))
        )
    if moe.balance == "quantile":
        others = "model.moe.n_limited_groups", "model.moe.n_experts"
        if moe.n_limited_groups < moe.n_expert_groups:
            closed = "assumes that every token can choose every expert, but group limits exclude some experts"
            yield problem(
                "model.moe.balance", closed, "use bias, or set model.moe.n_limited_groups = 0", others[0]
            )
        elif moe.top_k >= moe.n_experts:
            every = f"with {model.moe.top_k = } every token chooses every expert"
            none = f"balances the load by a bias for each expert, but {every}"
            yield problem("model.moe.balance", none, "use none, or lower model.moe.top_k", others[1])
    if moe.n_dense_layers > model.n_layers:
        most = f"must be at most {model.n_layers = }"
        yield problem("model.moe.n_dense_layers", most, "", "model.n_layers")
    elif moe.every > 1 and model.n_layers // moe.every * moe.every <= moe.n_dense_layers:
        after = f" and {model.moe.n_dense_layers = }" if moe.n_dense_layers else ""
        none = f"leaves no layer with experts, because {model.n_layers = }{after}"
        others = "model.n_layers", "model.moe.n_dense_layers"
        yield problem("model.moe.every", none, "use a smaller number", *others)


def _engine(config: Config) -> Iterator[Problem]:
    parallel, pipeline, engine = config.parallel, config.pipeline, config.parallel.data_parallel
    key = "parallel.data_parallel"
    fsdp2 = f"needs {key} = fsdp2, but it is {engine}"
    if parallel.shard_optimizer_over == "dp" and engine not in ("zero1", "zero2"):
        zero = f"needs {key} = zero1 or zero2, but it is {engine}"
        yield problem(
            "parallel.shard_optimizer_over", zero, f"use dp_shard, or set {key} = zero1 or zero2", key
        )
    if engine != "fsdp2" and config.precision.float8 in ("tensorwise", "rowwise"):
        held = f"needs {key} = fsdp2, because the buffers of {engine} cannot hold torchao's float8"
        yield problem("precision.float8", held, f"use blockwise, mxfp8 or none, or set {key} = fsdp2", key)
    if engine != "fsdp2" and parallel.cpu_offload:
        yield problem("parallel.cpu_offload", fsdp2, f"use false, or set {key} = fsdp2", key)
    if engine == "fsdp2" and parallel.pp > 1 and isinstance(parallel.reshard_after_forward, int):
        # FSDP2 makes groups of its own for this in every unit. Stages make theirs at different times.
        one = "cannot be a number with pipeline parallelism"
        yield problem("parallel.reshard_after_forward", one, "use auto, always or never", "parallel.pp")
    pins = config.precision.fp32_modules
    decays = [pin for pin in pins if fnmatchcase("layers.0.attention.decay", pin)]
    apart = decays and not any(fnmatchcase("layers.0", pin) for pin in decays)
    apart = apart and config.precision.compute == "bfloat16" and "linear" in config.model.pattern
    if engine == "fsdp2" and parallel.cpu_offload and config.compile.enabled and apart:
        whole = "cannot keep the float32 decays of linear attention whole, as compile.enabled = true needs"
        others = "compile.enabled", "precision.fp32_modules", "model.layer_pattern"
        yield problem("parallel.cpu_offload", whole, "use false, or set compile.enabled = false", *others)
    frees = engine == "fsdp2" and parallel.reshard_after_forward not in ("auto", "never")
    if parallel.pp > 1 and pipeline.schedule in SPLIT_BACKWARD and frees:
        later = f"would free parameters before {pipeline.schedule = !s} computes their gradients"
        others = key, "pipeline.schedule", "parallel.pp"
        yield problem("parallel.reshard_after_forward", later, "use auto or never", *others)


def _precision(config: Config) -> Iterator[Problem]:
    for key in ("storage", "reduce"):
        if config.precision.compute == "float64" and getattr(config.precision, key) == "bfloat16":
            rounds = "is too inexact for precision.compute = float64"
            yield problem(f"precision.{key}", rounds, "use float64 or float32", "precision.compute")


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, default = config.optimizer, MuonConfig()
    but = f"but it is {optimizer.name}"
    if optimizer.moment_dtype == "int8" and optimizer.name in ("lion", "muon"):
        adamw = f"needs optimizer.name = adamw, {but}"
        yield problem("optimizer.moment_dtype", adamw, "use bfloat16", "optimizer.name")
    if config.compile.optimizer and optimizer.name not in ("adamw", "muon"):
        adamw = f"needs optimizer.name = adamw or muon, {but}"
        yield problem("compile.optimizer", adamw, "use false", "optimizer.name")
    if config.compile.optimizer and optimizer.moment_dtype == "int8":
        int8 = "does not work with optimizer.moment_dtype = int8"
        yield problem(
            "compile.optimizer",
            int8,
            "use false, or set optimizer.moment_dtype = bfloat16",
            "optimizer.moment_dtype",
        )
    if optimizer.parametrization != "standard":
        used = {"base_dim": "model.dim", "base_depth": "model.n_layers"}
        for key in list(used)[: 2 if optimizer.parametrization == "completep" else 1]:
            if not getattr(optimizer.mup, key):
                least = f"must be above 0 with {optimizer.parametrization = !s}"
                remedy = f"set it to the {used[key]} of the model for which optimizer.lr was tuned"
                yield problem(f"optimizer.mup.{key}", least, remedy, "optimizer.parametrization")
    if optimizer.name == "muon":
        has_norm = config.model.qk_norm and set(config.model.pattern) != {"linear"}
        if optimizer.muon.qk_clip and has_norm and config.model.latent is None:
            undone = "because RMSNorm removes the scale of queries and keys, and bounds the logits"
            none = f"has no effect with model.qk_norm = true, {undone}"
            yield problem(
                "optimizer.muon.qk_clip", none, "use 0, or set model.qk_norm = false", "model.qk_norm"
            )
        return
    # With another optimizer, non-default values in [optimizer.muon] are a mistake.
    for key, value in optimizer.muon:
        if value != getattr(default, key):
            needed = f"needs optimizer.name = muon, but it is {optimizer.name}"
            remedy = "set optimizer.name = muon, or leave the table [optimizer.muon] out"
            yield problem(f"optimizer.muon.{key}", needed, remedy, "optimizer.name")


def _ineffective(config: Config) -> Iterator[Problem]:
    clips = config.optimizer.name == "muon" and config.optimizer.muon.qk_clip
    if clips and set(config.model.pattern) == {"linear"}:
        bounded = "has no effect, because linear attention normalises queries and keys"
        remedy = "use 0, or add another kind of layer to model.layer_pattern"
        yield problem("optimizer.muon.qk_clip", bounded, remedy, "model.layer_pattern")


def _folders(config: Config) -> Iterator[Problem]:
    checkpoint, sources = config.checkpoint, (*config.data.sources, *config.data.validation)
    folders = {
        "run.output_dir": config.run.output_dir,
        "checkpoint.local_dir": checkpoint.local_dir if checkpoint.local_interval else "",
        "data.cache_dir": config.data.cache_dir if any(is_url(source.path) for source in sources) else "",
    }
    for key, folder in folders.items():
        if (reason := why_not_local(folder)) is not None:
            copies = (
                "; to copy checkpoints to a store, set checkpoint.mirror" if key == "run.output_dir" else ""
            )
            yield problem(key, reason, f"use a folder on a local or shared disk{copies}")
    for key, path in (("checkpoint.resume", checkpoint.resume), ("checkpoint.init", checkpoint.init)):
        if (reason := why_not_local(path)) is not None:
            yield problem(key, reason, "copy the checkpoint to a local or shared disk, and name the copy")


def _others(config: Config) -> Iterator[Problem]:
    if config.model.mtp is not None and config.model.mtp.depth >= config.train.seq_len:
        least = (
            f"must be less than train.seq_len = {config.train.seq_len}, so that there is a token to predict"
        )
        yield problem("model.mtp.depth", least, "use a smaller depth", "train.seq_len")
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enabled:
        needed = "needs compile.enabled = true, because the compiler chooses the activations to keep"
        yield problem(
            "activation_checkpoint.mode",
            needed,
            "set compile.enabled = true, or use selective",
            "compile.enabled",
        )
    checkpointing = config.activation_checkpoint
    if checkpointing.mode == "offload" and checkpointing.modules and config.compile.enabled:
        whole = "must be [] with activation_checkpoint.mode = offload and compile.enabled = true"
        remedy = "use [], or set compile.enabled = false"
        yield problem("activation_checkpoint.modules", whole, remedy, "compile.enabled")
    if (
        checkpointing.mode == "full"
        and "attention" in checkpointing.modules
        and config.compile.enabled
        and config.parallel.tp > 1
    ):
        # PyTorch 2.13 cannot trace tensor parallelism with SDPA inside a checkpoint.
        without = "must not list attention with mode = full, compile.enabled = true and parallel.tp > 1"
        remedy = "use [], set activation_checkpoint.mode = selective, or set compile.enabled = false"
        yield problem("activation_checkpoint.modules", without, remedy, "compile.enabled", "parallel.tp")
    if not any(source.weight for source in config.data.sources):
        yield problem("data.sources", "has no source with a weight > 0", "give at least one source a weight")
    names = Counter(source.name for source in config.data.validation)
    if twice := [name for name, number in names.items() if number > 1]:
        named = f"has more than one source named {', '.join(twice)}"
        yield problem("data.validation", named, "give each name once")
    model_keys = [name for name in keys(type(config)) if name.startswith("model.")]
    for name in config.checkpoint.init_changes:
        if name not in model_keys:
            close = nearest(name, model_keys)
            remedy = f'did you mean "{close}"?' if close else "name a key of [model], e.g. model.norm_eps"
            yield problem("checkpoint.init_changes", f'lists "{name}", which is not a key of [model]', remedy)
    resume = config.checkpoint.resume
    if config.checkpoint.init and resume not in ("auto", "none"):
        continues = (
            f'starts at step 0 with loaded weights, but checkpoint.resume = "{resume}" continues a run'
        )
        yield problem("checkpoint.init", continues, "set only one of these keys", "checkpoint.resume")
