"""A second, plain implementation of the model in float64.

It loops over layers, heads and queries, and computes RoPE in complex numbers. It shares only the configuration with forge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.config.model import ModelConfig, RopeScalingConfig
from tests.support.reference_linear import linear_attention
from tests.support.reference_moe import Mixture, Parameters, feed_forward
from tests.support.reference_residual import DepthStream, through_layers


def reference_loss(
    parameters: Parameters,
    config: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    z_loss_coef: float = 0.0,
    mixture: Mixture | None = None,
) -> Tensor:
    """Return [objective, cross-entropy, squared logsumexp], each summed over non-negative labels.

    The objective excludes router losses, which `mixture` sums.
    """
    logits = reference_logits(parameters, config, tokens, positions, documents, labels, mixture)
    cross_entropy, z_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label >= 0:
            normaliser = row.exp().sum().log()
            cross_entropy = cross_entropy - (row[label] - normaliser)
            z_loss = z_loss + normaliser**2
    return torch.stack([cross_entropy + z_loss_coef * z_loss, cross_entropy, z_loss])


def reference_logits(
    parameters: Parameters,
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    labels: Tensor | None = None,
    mixture: Mixture | None = None,
) -> Tensor:
    rows = []
    for b in range(len(tokens)):
        where = torch.arange(tokens.shape[1]) if positions is None else positions[b]
        which = torch.zeros(tokens.shape[1]) if documents is None else documents[b]
        counts = [True] * tokens.shape[1] if labels is None else (labels[b] >= 0).tolist()
        rows.append(_one_sequence(parameters, config, tokens[b], where, which, counts, mixture))
    return torch.stack(rows)


def _one_sequence(
    parameters: Parameters,
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor,
    documents: Tensor,
    counts: list[bool],
    mixture: Mixture | None,
):
    x = _embedded(parameters, config, tokens)
    x = _trunk(parameters, config, x, positions, documents, counts, mixture)
    return _read(parameters, config, _norm(x, parameters["norm.weight"], config))


def _trunk(
    parameters: Parameters,
    config: ModelConfig,
    x: Tensor,
    positions: Tensor,
    documents: Tensor,
    counts: list[bool],
    mixture: Mixture | None,
):
    """Apply all layers, up to the final norm."""
    layers = range(config.n_layers)
    if config.residual == "attention":
        stream = _mixed(parameters, config, layers, x, positions, documents, counts, mixture)
        return stream.read(parameters["mix.query"])
    for layer in layers:
        x = _block(parameters, config, layer, x, positions, documents, counts, mixture)
    return x


def _mixed(
    parameters: Parameters,
    config: ModelConfig,
    layers: range,
    x: Tensor,
    positions: Tensor,
    documents: Tensor,
    counts: list[bool],
    mixture: Mixture | None,
) -> DepthStream:
    def attention(layer: int, x: Tensor) -> Tensor:
        return _attention_half(_own(parameters, layer), config, layer, x, positions, documents)

    def ffn(layer: int, x: Tensor) -> Tensor:
        return _ffn_half(_own(parameters, layer), config, layer, x, counts, mixture)

    size, eps = config.residual_block_size, config.norm_eps
    return through_layers(parameters, x, layers, size, eps, attention, ffn)


def _embedded(parameters: Parameters, config: ModelConfig, tokens: Tensor) -> Tensor:
    return parameters["embedding.weight"][tokens] * (config.dim**0.5 if config.scale_embeddings else 1.0)


def _read(parameters: Parameters, config: ModelConfig, x: Tensor) -> Tensor:
    logits = x @ parameters["embedding.weight" if config.tie_embeddings else "head.weight"].T
    return _cap(logits, config.logit_soft_cap)


def _block(
    parameters: Parameters,
    config: ModelConfig,
    layer: int,
    x: Tensor,
    positions: Tensor,
    documents: Tensor,
    counts: list[bool],
    mixture: Mixture | None,
) -> Tensor:
    own = _own(parameters, layer)
    x = x + _attention_half(own, config, layer, x, positions, documents)
    return x + _ffn_half(own, config, layer, x, counts, mixture)


def _own(parameters: Parameters, layer: int) -> Parameters:
    return {name: parameters[f"layers.{layer}.{name}"] for name in _names(parameters, layer)}


def _attention_half(
    own: Parameters, config: ModelConfig, layer: int, x: Tensor, positions: Tensor, documents: Tensor
) -> Tensor:
    h = _before(own, "attention", x, config)
    if config.kind_of(layer) == "linear":
        h = linear_attention(own, config, h, documents)
    else:
        h = _attention(own, config, layer, h, positions, documents)
    return _after(own, "attention", h, config)


def _ffn_half(
    own: Parameters, config: ModelConfig, layer: int, x: Tensor, counts: list[bool], mixture: Mixture | None
) -> Tensor:
    h = _before(own, "ffn", x, config)
    if "feed_forward.router.weight" in own:
        assert mixture is not None
        h = mixture.feed_forward(own, layer, h, counts, config)
    else:
        h = feed_forward(own, "feed_forward", h, config)
    return _after(own, "ffn", h, config)


def reference_loss_ahead(
    parameters: Parameters, config: ModelConfig, tokens: Tensor, labels: Tensor, documents: Tensor
) -> Tensor:
    """Return the loss of the multi-token prediction modules: computed token by token, summed over tokens, averaged over
    modules.
    """
    assert config.mtp is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, label, document in zip(tokens, labels.tolist(), documents, strict=True):
        length, where = len(row), torch.arange(len(row))
        x = _embedded(parameters, config, row)
        x = _trunk(parameters, config, x, where, document, [], None)
        x = _norm(x, parameters["norm.weight"], config)
        for ahead in range(1, config.mtp.depth + 1):
            layer = config.n_layers + ahead - 1
            own = {name: parameters[f"layers.{layer}.{name}"] for name in _names(parameters, layer)}
            later = [int(row[i + ahead]) if i + ahead < length else 0 for i in range(length)]
            embedded = _norm(
                _embedded(parameters, config, torch.tensor(later)), own["embedding_norm.weight"], config
            )
            both = torch.cat([embedded, _norm(x, own["hidden_norm.weight"], config)], dim=-1)
            joined, more = both @ own["projection.weight"].T, (where, document, [], None)
            if config.residual == "attention":
                x = _mixed(parameters, config, range(layer, layer + 1), joined, *more).partial
            else:
                x = _block(parameters, config, layer, joined, *more)
            x = _norm(x, own["output_norm.weight"], config)
            for i, logits in enumerate(_read(parameters, config, x)):
                there = i + ahead < length and document[i + ahead] == document[i]
                if there and label[i + ahead] >= 0:
                    total = total - logits.log_softmax(0)[label[i + ahead]] / config.mtp.depth
    return total


def _before(own: Parameters, half: str, x: Tensor, config: ModelConfig) -> Tensor:
    return x if config.norm_position == "post" else _norm(x, own[f"{half}_norm.weight"], config)


def _after(own: Parameters, half: str, x: Tensor, config: ModelConfig) -> Tensor:
    names = {"post": f"{half}_norm.weight", "sandwich": f"{half}_post_norm.weight"}
    return _norm(x, own[names[config.norm_position]], config) if config.norm_position in names else x


def _names(parameters: Parameters, layer: int) -> list[str]:
    prefix = f"layers.{layer}."
    return [name.removeprefix(prefix) for name in parameters if name.startswith(prefix)]


def _attention(
    own: Parameters, config: ModelConfig, layer: int, x: Tensor, positions: Tensor, documents: Tensor
):
    group = config.n_heads // config.n_kv_heads
    every = config.sliding_window_pattern
    full = config.sliding_window == 0 or (every > 0 and layer % every == every - 1)
    kind = "full" if full else "sliding"
    if config.layer_pattern:
        kind = config.layer_pattern[layer % len(config.layer_pattern)]
    window = config.sliding_window if kind == "sliding" else len(x)
    sliding = {"rope_theta": config.sliding_rope_theta, "rope_scaling": None}
    if kind == "sliding" and config.sliding_rope_theta:
        config = config.model_copy(update=sliding)
    if kind == "nope":
        positions = torch.zeros_like(positions)
        if config.rope_scaling is not None:
            unchanged = config.rope_scaling.model_copy(update={"attention_factor": 1.0})
            config = config.model_copy(update={"rope_scaling": unchanged})
    heads = []
    for head in range(config.n_heads):
        if config.attention == "mla":
            q, k, v = _latent_head(own, x, head, config, positions)
        else:
            q = _projection(own, "q", x, head, config, positions)
            k = _projection(own, "k", x, head // group, config, positions)
            v = _projection(own, "v", x, head // group, config, None)
        rows = []
        for i in range(len(x)):
            seen = [j for j in range(i + 1) if i - j < window and documents[i] == documents[j]]
            scores = _cap((k[seen] @ q[i]) / math.sqrt(len(q[i])), config.attention_soft_cap)
            sink = own["attention.sinks.weight"][head].exp() if config.attention_sinks else 0.0
            weights = scores.exp() / (scores.exp().sum() + sink)
            rows.append(weights @ v[seen])
        out = torch.stack(rows)
        if config.attention_gate != "none":
            size = out.shape[-1] if config.attention_gate == "element" else 1
            gate = x @ own["attention.wg.weight"][head * size : (head + 1) * size].T
            out = out / (1 + (-gate).exp())
        heads.append(out)
    out = torch.cat(heads, dim=-1) @ own["attention.wo.weight"].T
    return out + own["attention.wo.bias"] if config.attention_output_bias else out


def _latent_head(own: Parameters, x: Tensor, head: int, config: ModelConfig, positions: Tensor):
    """Return queries, keys and values of one latent-attention head, as in the DeepSeek-V2 paper."""
    mla = config.mla
    assert mla is not None
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank

    def down(name: str) -> Tensor:
        out = x @ own[f"attention.{name}.weight"].T
        return out + own[f"attention.{name}.bias"] if config.attention_bias else out

    rows = slice(head * (nope + rope), (head + 1) * (nope + rope))
    if mla.q_lora_rank:
        latent = _norm(down("wq_a"), own["attention.q_norm.weight"], config)
        q = latent @ own["attention.wq_b.weight"][rows].T
    else:
        q = x @ own["attention.wq.weight"][rows].T
    both = down("wkv_a")
    latent = _norm(both[:, :rank], own["attention.kv_norm.weight"], config)
    size = nope + mla.v_head_dim
    up = latent @ own["attention.wkv_b.weight"][head * size : (head + 1) * size].T
    q = torch.cat([q[:, :nope], reference_rotation(q[:, nope:], positions, config)], dim=-1)
    k = torch.cat([up[:, :nope], reference_rotation(both[:, rank:], positions, config)], dim=-1)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        q = q * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
    return q, k, up[:, nope:]


def _projection(
    own: Parameters, letter: str, x: Tensor, head: int, config: ModelConfig, positions: Tensor | None
):
    """Return one head's queries, keys or values `[seq, head_dim]`, normalised and rotated at `positions`."""
    rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
    whole = x @ own[f"attention.w{letter}.weight"].T
    if config.attention_bias:
        whole = whole + own[f"attention.w{letter}.bias"]
    if positions is None:
        return whole[:, rows]
    if config.qk_norm and config.qk_norm_over == "projection":
        out = _norm(whole, own[f"attention.{letter}_norm.weight"], config)[:, rows]
    elif config.qk_norm:
        out = _norm(whole[:, rows], own[f"attention.{letter}_norm.weight"], config)
    else:
        out = whole[:, rows]
    return reference_rotation(out, positions, config)


def reference_rotation(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """Rotate x `[seq, head_dim]`: multiply complex x[i] + j x[i + rope_dim/2] by exp(j * position * frequency i)."""
    half = (x.shape[-1] if config.attention == "mla" else round(config.head_dim * config.rope_fraction)) // 2
    x, rest = x[:, : 2 * half], x[:, 2 * half :]
    frequencies, factor = reference_frequencies(config, 2 * half)
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.full_like(angles, factor), angles)
    return torch.cat([turned.real, turned.imag, rest], dim=-1)


def reference_frequencies(config: ModelConfig, dim: int) -> tuple[list[float], float]:
    """Return the frequency of each of the `dim` / 2 pairs, and the factor on the rotated vectors."""
    plain = [config.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain], 1.0
    if scaling.kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in plain], 1.0
    low, high = (
        dim
        * math.log(scaling.original_max_position / (beta * 2 * math.pi))
        / (2 * math.log(config.rope_theta))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
    blended = [f / scaling.factor * share + f * (1 - share) for f, share in zip(plain, shares, strict=True)]
    return blended, scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def _llama3(frequency: float, scaling: RopeScalingConfig) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    factor = 1 + weight if config.zero_centered_norms else weight
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_eps) * factor


def _cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x
