"""Muon gets the same whole matrices under every engine and layout: losses, momentum and parameters equal one process.

The reference is three steps of a plain module in one process, under a plain Muon, matrix by matrix, and PyTorch's AdamW.
"""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.config import Config, parse_toml_text
from forge.model import AttentionMask
from forge.optim import build_optimizer, muon
from forge.optim.matrices import WholeMatrices
from forge.tools.verify.record import Settings, every_batch, make_step
from tests.support.buffers import SMALL
from tests.support.building import built
from tests.support.equivalence import TOLERANCE, plain_model, tiny_config, wholes
from tests.support.harness import run_ranks
from tests.support.layouts import experts_text, slow_unless
from tests.support.random_layouts import MODELS, cases
from tests.support.resharding import SAVED_AFTER, train_part

STEPS, LR = 3, 0.02
ENGINES = ("ddp", "zero1", "zero2", "fsdp2")
REPLICAS = "dp_replicate = 2\ndp_shard = 2"
OVER_REPLICAS = f'{REPLICAS}\nshard_optimizer_over = "dp"'
# Attention is replicated, so there may be more ranks than key/value heads.
FEED_FORWARD_ALONE = (
    'tp = 4\ntp_plan = {"layers.*.feed_forward.w1" = "colwise", "layers.*.feed_forward.w3" = "colwise", '
    '"layers.*.feed_forward.w2" = "rowwise"}'
)
OPTIONS = {
    "plain": "",
    "all": "lr = 0.03\nmomentum = 0.9\nnesterov = false\northogonalization = 'polar_express'\nadjust_lr = 'original'\n"
    "second_moment = 'neuron'\ncautious_decay = true\nsplit_heads = true\nns_steps = 6",
}
# The maximum logits of some heads exceed the limit, and others do not.
CLIP = "qk_clip = 0.03"
CLIP_LATENT = "qk_clip = 0.015"
# Biases contribute to the logits too, and the mask decides which logits exist.
CLIPPED = "attention_bias = true\nsliding_window = 24"
LATENT = (
    'attention = "mla"\n[model.mla]\nq_lora_rank = 12\nkv_lora_rank = 10\nqk_nope_head_dim = 6\nqk_rope_head_dim = 4\n'
    "v_head_dim = 5\n"
)
OF_ALL = {
    "clipped": CLIPPED,
    "as many key heads": CLIPPED,
    "latent": LATENT,
    "latent, queries direct": LATENT.replace("q_lora_rank = 12", "q_lora_rank = 0"),
}
POLAR_EXPRESS = torch.tensor(
    [
        [8.28721201814563, -23.595886519098837, 17.300387312530933],
        [4.107059111542203, -2.9478499167379106, 0.5448431082926601],
        [3.9486908534822946, -2.908902115962949, 0.5518191394370137],
        [3.3184196573706015, -2.488488024314874, 0.51004894012372],
        [2.300652019954817, -1.6689039845747493, 0.4188073119525673],
        [1.891301407787398, -1.2679958271945868, 0.37680408948524835],
    ],
    dtype=torch.float64,
) / torch.tensor([1.01, 1.01**3, 1.01**5], dtype=torch.float64)


def config_text(model: str, parallel: str = "", options: str = "plain") -> str:
    if model == "experts":
        text = experts_text("sequence_aux_loss", parallel, micro=2)
    else:
        keys = OF_ALL.get(model, MODELS.get(model, ""))
        text = tiny_config(parallel=parallel, model=keys, micro=2)
    if model == "as many key heads":
        text = text.replace("n_kv_heads = 2", "n_kv_heads = 4")
    return with_muon(text, options)


def with_muon(text: str, options: str) -> str:
    return (
        f'{text}\n[optimizer]\nname = "muon"\nlr = {LR}\n[optimizer.muon]\n{OPTIONS.get(options, options)}\n'
    )


class PlainMuon:
    """Muon with the options of OPTIONS, one matrix at a time."""

    def __init__(self, config: Config, model: torch.nn.Module):
        self.keys, self.config = config.optimizer.muon, config
        self.named = dict(model.named_parameters())
        self.own = [
            n for n, p in self.named.items() if n.startswith("layers") and p.ndim > 1 and "router" not in n
        ]
        self.logits: dict[str, Tensor] = {}
        self.clipped: list[Tensor] = []
        if self.keys.qk_clip:
            for layer, block in model.layers.items():
                block.attention.attend = self.recorded(layer, block.attention.attend)
        self.momentum = {n: torch.zeros_like(self.named[n]) for n in self.own}
        self.row_moment = {n: torch.zeros_like(self.named[n][..., 0]) for n in self.own}
        rest = {n: p for n, p in self.named.items() if n not in self.own}
        plain = [n for n in rest if any(fnmatchcase(n, glob) for glob in config.optimizer.no_decay)]
        groups = [
            {"params": [p for n, p in rest.items() if n not in plain], "weight_decay": 0.1},
            {"params": [rest[n] for n in plain], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=LR, betas=config.optimizer.betas
        )

    def recorded(self, layer: str, attend: Any) -> Any:
        """Wrap `attend` to record the logits of all visible pairs."""

        def record(
            q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None = None
        ) -> Tensor:
            logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
            self.logits[layer] = logits.detach().masked_fill(~mask.table, -torch.inf)
            return attend(q, k, v, mask, sinks)

        record.prepare = attend.prepare
        return record

    def clip(self) -> None:
        model = self.config.model
        for layer, logits in self.logits.items():
            scale = (self.keys.qk_clip / logits.amax((0, 2, 3))).clamp(max=1)
            self.clipped.append(scale < 1)
            if model.latent is not None:
                self.clip_latent(layer, scale)
                continue
            several = model.n_heads > model.n_kv_heads
            for w in ("wq",) if several else ("wq", "wk"):
                for leaf in ("weight", "bias"):
                    parameter = self.named[f"layers.{layer}.attention.{w}.{leaf}"]
                    by_head = parameter.unflatten(0, (len(scale), -1))
                    by_head *= (scale if several else scale.sqrt()).view(-1, *[1] * (by_head.ndim - 1))

    def clip_latent(self, layer: str, scale: Tensor) -> None:
        """Clip a latent layer. Per head, queries have 6 elements without RoPE and 4 with it; keys have 6 and values 5."""
        queries = "wq_b" if self.config.model.latent.q_lora_rank else "wq"
        q, kv = (self.named[f"layers.{layer}.attention.{w}.weight"] for w in (queries, "wkv_b"))
        for head, factor in enumerate(scale):
            q[10 * head : 10 * head + 6] *= factor.sqrt()
            q[10 * head + 6 : 10 * head + 10] *= factor
            kv[11 * head : 11 * head + 6] *= factor.sqrt()

    def matrices(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return views of `tensor`, one per matrix."""
        if tensor.ndim == 3:
            return list(tensor)
        model, leaf = self.config.model, name.split(".")[-2]
        heads = {"wq": model.n_heads, "wk": model.n_kv_heads, "wv": model.n_kv_heads}.get(leaf, 1)
        return list(tensor.chunk(heads if self.keys.split_heads else 1))

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        lr, mu = self.keys.lr or LR, self.keys.momentum
        for name in self.own:
            weight, grad, mean = self.named[name], self.named[name].grad, self.momentum[name]
            mean.mul_(mu).add_(grad, alpha=1 - mu)
            update = (1 - mu) * grad + mu * mean if self.keys.nesterov else mean.clone()
            moments = self.row_moment[name]
            rows = self.matrices(name, moments) if moments.ndim == 1 else list(moments)
            for matrix, moment in zip(self.matrices(name, update), rows, strict=True):
                matrix.copy_(self.scaled(self.orthogonal(matrix), moment))
            decayed = 0.1 * weight
            if self.keys.cautious_decay:
                decayed = torch.where(update * weight > 0, decayed, 0.0)
            weight.sub_(lr * (decayed + update))
        self.clip()

    def orthogonal(self, x: Tensor) -> Tensor:
        polar = self.keys.orthogonalization == "polar_express"
        steps = POLAR_EXPRESS.tolist() if polar else [[3.4445, -4.7750, 2.0315]] * self.keys.ns_steps
        x = x / (x.norm() * (1.01 if polar else 1.0)).clamp(min=1e-7)
        for a, b, c in steps:
            if x.shape[0] <= x.shape[1]:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            else:
                gram = x.T @ x
                x = a * x + x @ (b * gram + c * gram @ gram)
        return x

    def scaled(self, x: Tensor, moment: Tensor) -> Tensor:
        rows, columns = x.shape
        if self.keys.second_moment == "neuron":
            moment.mul_(0.95).add_(x.square().mean(1), alpha=0.05)
            divided = x / (moment.sqrt() + 1e-10)[:, None]
            x = divided * (x.norm() / divided.norm().clamp(min=1e-7))
        if self.keys.adjust_lr == "original":
            return x * max(1, rows / columns) ** 0.5
        return x * 0.2 * max(rows, columns) ** 0.5


@functools.cache
def expected(text: str) -> dict[str, Any]:
    """Return the losses of three steps of a plain module, its final parameters and Muon's final state."""
    config = parse_toml_text(text)
    net, losses = plain_model(config), []
    optimizer = PlainMuon(config, net)
    for _, batch in zip(range(STEPS), every_batch(config), strict=False):
        valid = (batch.labels >= 0).sum().double()
        net.set_loss_scale(1 / valid)
        found = net(batch.tokens, batch.labels, batch.positions, batch.documents)
        net.zero_grad()
        (found[0] / valid).backward()
        losses.append((found[1] / valid).item())
        optimizer.step()
        for router in net.routers.values():
            router.previous_counts = router.counts.clone()
            if router.config.balance == "bias":
                even = router.counts.sum() / router.config.n_experts
                router.bias += router.config.bias_update_rate * (even - router.counts).sign()
            router.sums.zero_()
    if optimizer.clipped:
        assert 0.2 < torch.stack(optimizer.clipped).double().mean() < 0.8
    parameters = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    states = {"momentum": optimizer.momentum}
    if optimizer.keys.second_moment == "neuron":
        states["row_moment"] = optimizer.row_moment
    return {"losses": losses, "parameters": parameters, **states}


def train(rank: int, world: int, text: str) -> dict[str, Any]:
    model, config, meshes = built(text, world)
    # Several rounds. No other test uses this process.
    muon.WholeMatrices = functools.partial(WholeMatrices, round_numel=4000)
    optimizer = build_optimizer(model.shards, config.optimizer, meshes.stage)
    losses = []
    read = every_batch(config, meshes.data_rank, meshes.data_ranks)
    for step, batch in zip(range(STEPS), read, strict=False):
        made = make_step(model, optimizer, batch, step + 1, Settings(lr=LR, max_norm=0))
        losses.append(made.pieces["loss", "cross-entropy"][0].values.item())
    found: dict[str, Any] = {"losses": losses}
    found["parameters"] = wholes(model.shards, [shard.data for shard in model.shards])
    for slot in ("momentum", "row_moment"):
        own = [(shard, values) for name, shard, values in optimizer.tensors() if name == slot]
        if own:
            found[slot] = wholes(*map(list, zip(*own, strict=True)))
    copies = {s.name: s.data.clone() for s in model.shards if s.replicas is not None and s.boxes}
    groups = {s.name: s.replicas for s in model.shards if s.name in copies}
    ranks = {name: tuple(torch.distributed.get_process_group_ranks(group)) for name, group in groups.items()}
    return found | {"copies": copies, "ranks": ranks}


def assert_same(found: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    assert all(one["losses"] == pytest.approx(one_process["losses"], rel=0, abs=TOLERANCE) for one in found)
    for kind in one_process.keys() - {"losses"}:
        assert found[0][kind].keys() == one_process[kind].keys()
        for name, values in one_process[kind].items():
            difference = (found[0][kind][name] - values).abs().max().item()
            assert difference <= TOLERANCE, f"{kind} {name}: differs by {difference:.3e}"
    for one in found:
        for name, copy in one["copies"].items():
            for rank in one["ranks"][name]:
                assert torch.equal(copy, found[rank]["copies"][name]), f"{name} is another on rank {rank}"


def _layouts() -> list[Any]:
    found = []
    for engine in ENGINES:
        over = OVER_REPLICAS if engine.startswith("zero") else REPLICAS
        layouts = {
            "2 ranks": (2, "", "dense"),
            "tp": (4, "tp = 2", "dense"),
            "tp above kv heads": (4, FEED_FORWARD_ALONE, "dense"),
            "cp": (2, "cp = 2", "dense"),
            "replicas": (4, REPLICAS, "dense"),
            "replicas that share": (4, over, "dense"),
            "pp": (4, "pp = 2", "dense"),
            "ep": (4, "ep = 2", "experts"),
            "ep in replicas": (4, f"ep = 2\n{REPLICAS}", "experts"),
            "tp and ep": (4, "tp = 2\nep = 2", "experts"),
        }
        fast = {
            "fsdp2": {"plain": {"2 ranks"}, "all": {"tp"}},
            "zero1": {"plain": {"ep"}, "all": {"2 ranks"}},
        }.get(engine, {"plain": {"2 ranks"}, "all": set()})
        for name, (world, keys, model) in layouts.items():
            for options in OPTIONS:
                marks = () if name in fast[options] else pytest.mark.slow
                if name != "replicas that share" or over != REPLICAS:
                    case = (engine, world, keys, model, options)
                    found.append(pytest.param(*case, marks=marks, id=f"{engine}-{name}-{options}"))
    return found


@pytest.mark.parametrize(("engine", "world", "keys", "model", "options"), _layouts())
def test_three_steps_equal_one_plain_process(
    engine: str, world: int, keys: str, model: str, options: str
) -> None:
    small = "" if engine == "fsdp2" else SMALL
    text = config_text(model, f'data_parallel = "{engine}"\n{keys}{small}', options)
    assert_same(run_ranks(train, world, text), expected(config_text(model, "", options)))


SELECTIVE_COMPILED = """[activation_checkpoint]
mode = "selective"
[compile]
enabled = true
backend = "aot_eager_decomp_partition"
"""
CLIPPED_LAYOUTS = {
    "one process": (1, "", "clipped"),
    "tp": (2, "tp = 2", "clipped"),
    "keys have heads of their own, tp": (4, "tp = 2", "as many key heads"),
    "cp by heads": (4, 'cp = 2\ncontext = "ulysses"', "clipped"),
    "zero1, cp": (4, f'data_parallel = "zero1"\ncp = 2\ncontext = "ring"{SMALL}', "as many key heads"),
    "pp": (4, "pp = 2", "clipped"),
    "tp above kv heads": (4, FEED_FORWARD_ALONE, "clipped"),
    "latent, cp that moves latents": (2, "cp = 2", "latent"),
    "latent, tp, cp by heads": (4, 'tp = 2\ncp = 2\ncontext = "ulysses"', "latent"),
    "latent, queries direct, zero2, ring": (
        4,
        f'data_parallel = "zero2"\ncp = 2\ncontext = "ring"{SMALL}',
        "latent, queries direct",
    ),
    "latent, tp, pp": (4, "tp = 2\npp = 2", "latent, queries direct"),
    "latent, compiled": (
        4,
        f"cp = 2\n{SELECTIVE_COMPILED}",
        "latent",
    ),
    "replicas, recomputed": (4, f'{REPLICAS}\n[activation_checkpoint]\nmode = "full"', "clipped"),
    "compiled, selectively recomputed": (
        2,
        SELECTIVE_COMPILED,
        "clipped",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("tp", "latent, cp that moves latents")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CLIPPED_LAYOUTS
    ],
)
def test_logits_above_the_limit_are_clipped_as_in_one_plain_process(name: str) -> None:
    world, keys, model = CLIPPED_LAYOUTS[name]
    clip = CLIP_LATENT if model == "latent" else CLIP
    found = run_ranks(train, world, config_text(model, keys, clip))
    assert_same(found, expected(config_text(model, "", clip)))


@pytest.mark.parametrize("case", cases(12, (), ["everything", "tied", "plain"]) + cases(8, (4,), ["bias"]))
def test_random_layouts_equal_one_plain_process(case: tuple[int, str, str]) -> None:
    world, model, text = case
    one_process = expected(with_muon(tiny_config(model=MODELS[model]), "all"))
    assert_same(run_ranks(train, world, with_muon(text, "all")), one_process)


# Name -> saving and continuing (ranks, layout).
MOVES = {
    "one process to fsdp2 with tp": ((1, ""), (2, "tp = 2")),
    "fsdp2 with ep to zero1": ((4, "ep = 2"), (2, f'data_parallel = "zero1"{SMALL}')),
    "zero1 with tp to ddp with ep": (
        (4, 'data_parallel = "zero1"\ntp = 2'),
        (2, 'data_parallel = "ddp"\nep = 2'),
    ),
    "zero2 in replicas to one process": ((4, f'data_parallel = "zero2"\n{OVER_REPLICAS}{SMALL}'), (1, "")),
}


@pytest.mark.parametrize(
    "move", [pytest.param(move, marks=slow_unless(move in list(MOVES)[::3])) for move in MOVES]
)
def test_a_checkpoint_of_one_layout_continues_under_another(move: str, tmp_path: Path) -> None:
    (world, layout), (other_world, other_layout) = MOVES[move]
    whole = _uninterrupted()
    run_ranks(train_part, world, config_text("experts", layout, "all"), str(tmp_path), 0, SAVED_AFTER)
    text = config_text("experts", other_layout, "all")
    for found in run_ranks(train_part, other_world, text, str(tmp_path), SAVED_AFTER, STEPS):
        assert found["losses"] == pytest.approx(whole["losses"][SAVED_AFTER:], rel=0, abs=TOLERANCE)
        for name, parameter in whole["parameters"].items():
            difference = (found["parameters"][name] - parameter).abs().max().item()
            assert difference <= TOLERANCE, f"{name}: differs by {difference:.3e}"


@functools.cache
def _uninterrupted() -> dict[str, Any]:
    return run_ranks(train_part, 1, config_text("experts", "", "all"), "nowhere", 0, STEPS)[0]
