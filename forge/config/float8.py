"""Invalid combinations of precision.float8 with sizes and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import lcm

from forge.config.keys import to_literal
from forge.config.model import ModelConfig
from forge.config.problem import Problem, multiples, problem
from forge.config.schema import Config

# Block size of the block formats (forge/parallel/float8/formats.py).
BLOCKS = {"blockwise": 128, "mxfp8": 32}


def check_float8(config: Config) -> Iterator[Problem]:
    """Yield the conflicts between precision.float8 and other keys."""
    precision, train, parallel = config.precision, config.train, config.parallel
    if precision.float8 == "none":
        return
    key = "precision.float8_all_gather"
    if precision.float8_all_gather is True and parallel.tp > 1:
        yield problem(key, f"cannot be true with {parallel.tp = }", "use auto or false", "parallel.tp")
    if precision.float8_all_gather is True and precision.float8 == "rowwise":
        rows = "cannot be true with precision.float8 = rowwise, whose scales need whole rows and columns"
        yield problem(key, rows, "use auto or false", "precision.float8")
    if precision.float8 in BLOCKS:
        yield from _gathered_in_blocks(config)
        yield from _blocks_of_tokens(config, BLOCKS[precision.float8])
        yield from _blocks_of_features(config, BLOCKS[precision.float8])
        yield from _partial_gradients(config)
        yield from _experts_without_kernel(config)
        return
    if precision.float8_experts is True:
        needed = f"needs precision.float8 = blockwise or mxfp8, but it is {precision.float8}"
        yield problem("precision.float8_experts", needed, "use auto or false", "precision.float8")
    if train.micro_batch_size * train.seq_len % (16 * parallel.cp):
        others = "train.micro_batch_size", "train.seq_len", "parallel.cp"
        number = train.micro_batch_size * train.seq_len / parallel.cp
        numbers = f"{train.micro_batch_size} * {train.seq_len} / {parallel.cp} = {number:g}"
        product = f"{' * '.join(others[:2])} / {others[2]} = {numbers}"
        tokens = f"needs a multiple of 16 tokens per microbatch on each rank, but {product}"
        yield problem("precision.float8", tokens, "use another train.seq_len", *others)


def _gathered_in_blocks(config: Config) -> Iterator[Problem]:
    """Yield a problem for each key that forbids precision.float8_all_gather = true with block formats."""
    precision, parallel, mode = config.precision, config.parallel, config.activation_checkpoint.mode
    if precision.float8_all_gather is not True:
        return
    reshard, mx = parallel.reshard_after_forward, precision.float8 == "mxfp8"
    forbidding = {
        "parallel.data_parallel": parallel.data_parallel in ("ddp", "zero1", "zero2"),
        "parallel.ep": parallel.ep > 1,
        "parallel.reshard_after_forward": isinstance(reshard, int) or (mx and reshard == "never"),
        "parallel.pp": mx and reshard == "auto" and parallel.pp > 1,
        "compile.enabled": config.compile.enabled,
        "activation_checkpoint.mode": mx and mode not in ("none", "offload"),
    }
    for key, forbids in forbidding.items():
        if forbids:
            section, _, name = key.partition(".")
            value = to_literal(getattr(getattr(config, section), name))
            with_it = f"cannot be true with {key} = {value}"
            yield problem("precision.float8_all_gather", with_it, "use auto or false", key)


def _blocks_of_tokens(config: Config, block: int) -> Iterator[Problem]:
    """Yield a problem unless each rank has whole blocks of tokens. A block shared by two ranks would have two scales."""
    parallel, seq_len = config.parallel, config.train.seq_len
    # Context parallelism distributes 2 * cp chunks of a sequence. With sequence parallelism, latent attention computes
    # on the sequence shards of the tp ranks. Latent experts always do.
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    in_pieces = config.model.latent is not None and parallel.sequence_parallel
    if config.model.moe is not None and config.model.moe.latent_dim:
        names = ("layers.0.feed_forward.to_latent", "layers.0.feed_forward.from_latent")
        excluded = config.precision.float8_exclude
        in_pieces |= not all(any(fnmatchcase(name, p) for p in excluded) for name in names)
    pieces = parallel.tp if in_pieces else 1
    parts = lcm(chunks, parallel.cp * pieces)
    if parts > 1 and seq_len % (block * parts):
        near = multiples(seq_len, block * parts)
        others = ("precision.float8", "parallel.cp", *(("parallel.tp",) if pieces > 1 else ()))
        size = f"{parts} * {block} = {block * parts}"
        each = f"so that each of {parts} parts of a sequence has whole blocks of {block} tokens"
        whole = f"must be a multiple of {size}, {each}"
        yield problem("train.seq_len", whole, f"use {near}", *others)


def _partial_gradients(config: Config) -> Iterator[Problem]:
    """Yield a problem for allgather context parallelism with latent attention in float8, unless "*.wkv_b" is excluded.

    Every cp rank expands all gathered latents to keys and values with wkv_b. In backward, each rank has only a partial
    sum of the gradient of these keys and values. Quantising partial sums differs from quantising their total, so
    results would depend on cp.
    """
    excluded = any(fnmatchcase("layers.0.attention.wkv_b", p) for p in config.precision.float8_exclude)
    gathers = config.parallel.cp > 1 and config.parallel.context == "allgather"
    if gathers and config.model.latent is not None and not excluded:
        parts = (
            "would change the results, because each rank would round only a partial sum of the gradients of "
            "attention.wkv_b to float8"
        )
        remedy = 'add "*.wkv_b" to precision.float8_exclude, or use parallel.context = ring or ulysses'
        others = "parallel.context", "precision.float8", "model.attention"
        yield problem("parallel.cp", parts, remedy, *others)


def _experts_without_kernel(config: Config) -> Iterator[Problem]:
    """Yield a problem if routed experts use blockwise without emulation, because no GPU has a kernel for them."""
    precision, model = config.precision, config.model
    experts = [f"layers.{i}.feed_forward.experts" for i in range(model.n_layers) if model.has_experts(i)]
    converted = [one for one in experts if not any(fnmatchcase(one, p) for p in precision.float8_exclude)]
    never = precision.float8_emulate is False and precision.float8_experts is not False
    if precision.float8 == "blockwise" and never and converted:
        kernel = "cannot be false with blockwise, because no GPU has a kernel for routed experts in it"
        remedy = "use auto, which emulates their products, or set precision.float8_experts = false"
        yield problem("precision.float8_emulate", kernel, remedy, "precision.float8", "model.moe")


def _blocks_of_features(config: Config, block: int) -> Iterator[Problem]:
    """Yield a problem if tensor parallelism cuts a float8 block of a layer's features. Applies to tp_plan = auto only."""
    tp = config.parallel.tp
    if tp == 1 or config.parallel.tp_plan != "auto":
        return
    whole: dict[str, int] = {}
    for name, side in _split_features(config.model):
        excluded = any(
            fnmatchcase(f"layers.0.{name}", pattern) for pattern in config.precision.float8_exclude
        )
        # Layers of two kinds may have a layer of one name. A cut one counts.
        if not excluded and side % tp == 0 and whole.get(name, 0) % (block * tp) == 0:
            whole[name] = side
    if cut := cut_block(config.precision.float8, whole, tp):
        yield problem("parallel.tp", *cut, "precision.float8")


def cut_block(recipe: str, sides: Mapping[str, int], tp: int) -> tuple[str, str] | None:
    """Return (complaint, remedy) if a boundary between `tp` ranks cuts a block of `recipe`; None otherwise.

    A block shared by two ranks would have two scales. sides: layer name -> number of features split by tensor
    parallelism.
    """
    block = BLOCKS[recipe]
    cut = [name for name, side in sides.items() if side % (block * tp)]
    if not cut:
        return None
    first = cut[0]
    fitting = [
        n for n in range(2, tp) if tp % n == 0 and all(side % (block * n) == 0 for side in sides.values())
    ]
    smaller = "" if recipe == "mxfp8" else "set precision.float8 = mxfp8 (blocks of 32), "
    each = f"leaves {sides[first] / tp:g} features of {first} on each rank, which is not a multiple of the block size {block}"
    kinds = ", ".join(f'"*.{kind}"' for kind in dict.fromkeys(name.rpartition(".")[2] for name in cut))
    return each, f"use {max(fitting, default=1)}, {smaller}or add {kinds} to precision.float8_exclude"


def _split_features(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield (name within a Transformer block, number of split features) of each linear layer split over tp ranks."""
    linear, moe, pattern = model.linear_attention, model.moe, model.layer_pattern
    if linear is not None:
        yield "attention.wk", linear.n_key_heads * linear.key_head_dim
        yield "attention.wv", linear.n_value_heads * linear.value_head_dim
    if mla := model.latent:
        yield (
            "attention.wq_b" if mla.q_lora_rank else "attention.wq",
            model.n_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
        )
        yield "attention.wkv_b", model.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "attention.wo", model.n_heads * mla.v_head_dim
    elif not pattern or set(pattern) != {"linear"}:
        yield "attention.wq", model.n_heads * model.head_dim
        yield "attention.wk", model.n_kv_heads * model.head_dim
        yield "attention.wv", model.n_kv_heads * model.head_dim
        yield "attention.wo", model.n_heads * model.head_dim
    weights = ("w1", "w2") if model.activation == "relu2" else ("w1", "w3", "w2")
    if moe is None or moe.n_dense_layers or moe.every > 1:
        yield from ((f"feed_forward.{weight}", model.ffn_dim) for weight in weights)
    if moe is not None and moe.n_shared_experts:
        shared = moe.n_shared_experts * moe.expert_dim
        yield from ((f"feed_forward.shared.{weight}", shared) for weight in weights)
