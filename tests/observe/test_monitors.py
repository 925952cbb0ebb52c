"""Monitors measure correctly, do not change a run, and never make the host wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.config.model import ModelConfig
from forge.model import Transformer
from forge.observe.monitors import QUERIES, Monitors, chosen_queries
from forge.shard import Shard
from tests.support.runs import EXPERTS, Run

SEQ, DIM, HEADS, CPU = 12, 16, 2, torch.device("cpu")


def model() -> Transformer:
    torch.manual_seed(3)
    config = ModelConfig(
        dim=DIM,
        n_layers=2,
        n_heads=HEADS,
        n_kv_heads=1,
        head_dim=8,
        ffn_dim=24,
        vocab_size=31,
        rope_theta=1e4,
    )
    made = Transformer(config, SEQ).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.reset_buffers(torch.float64)
    return made


def monitors_of(made: Transformer, *chosen: str) -> Monitors:
    names = [name for name, _ in made.named_parameters()]
    return Monitors(chosen, [made], names, n_layers=2, units=24, device=CPU)


def values(monitors: Monitors, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the monitors' values on one process."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    return monitors.read(monitors.reduce().tolist())


def test_numbers_equal_a_plain_computation(monkeypatch) -> None:
    made, tokens = model(), torch.randint(31, (3, SEQ))
    outputs: dict[int, torch.Tensor] = {}
    logits: list[torch.Tensor] = []
    for layer, block in made.layers.items():
        block.register_forward_hook(lambda _, __, out, layer=int(layer): outputs.__setitem__(layer, out))
    attention: Any = made.layers["0"].attention
    attend = attention.attend
    monitors = monitors_of(made, "activations", "attention", "gradients", "weights", "updates")
    monitors.begin()
    watched = attention.attend

    def noting(q, k, v, mask, sinks=None):
        logits.append(q @ k.repeat_interleave(HEADS, 1).transpose(-1, -2) * 8**-0.5)
        return watched(q, k, v, mask, sinks)

    noting.prepare = attend.prepare  # type: ignore[attr-defined]
    attention.attend = noting
    made(tokens, tokens)[0].backward()
    monitors.remove()
    assert attention.attend is attend
    shards = [Shard.whole(name, parameter) for name, parameter in made.named_parameters()]
    gradients = {shard.name: shard.grad.norm().item() for shard in shards}
    monitors.count_gradients(shards)
    monitors.before_update(shards)
    for shard in shards:
        shard.data.sub_(0.1 * shard.grad)
    monitors.after_update(shards)
    found = values(monitors, monkeypatch)

    for layer, out in outputs.items():
        one = found["activations"][str(layer)]
        assert one["rms"] == pytest.approx(out.square().mean().sqrt().item())
        assert one["max"] == pytest.approx(out.abs().max().item())
    (found_logits,) = logits
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    shares = found_logits.masked_fill(hidden, -torch.inf).softmax(-1)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(-1).mean().item()
    assert found["attention"]["0"]["max_logit"] == pytest.approx(
        found_logits.masked_fill(hidden, -9e9).max().item()
    )
    assert found["attention"]["0"]["entropy"] == pytest.approx(entropy)
    for name, norm in gradients.items():
        weight = dict(made.named_parameters())[name].norm().item()
        assert found["gradients"][name] == pytest.approx(norm)
        assert found["weights"][name] == pytest.approx(weight)
        assert found["updates"][name] == pytest.approx(0.1 * norm / weight)


def test_a_never_open_gate_is_a_dead_unit_and_an_always_open_one_is_saturated(monkeypatch) -> None:
    made = model()
    block: Any = made.layers["1"]
    block.ffn_norm.weight.data.fill_(1.0)
    block.feed_forward.w1.register_forward_hook(_shift)
    monitors = monitors_of(made, "activations")
    monitors.begin()
    made(torch.randint(31, (8, SEQ)))
    monitors.remove()
    units = values(monitors, monkeypatch)["units"]
    assert units["1"] == {"dead": 6 / 24, "saturated": 3 / 24}
    assert units["0"] == {"dead": 0.0, "saturated": 0.0}


def _shift(_module: Any, _inputs: Any, gate: torch.Tensor) -> torch.Tensor:
    return gate + torch.tensor([-1e3] * 6 + [1e3] * 3 + [0.0] * 15, dtype=gate.dtype)


def test_queries_are_spread_over_the_sequence_and_the_last_is_among_them() -> None:
    where, positions = chosen_queries(1024, None, torch.device("cpu"))
    assert len(where) == QUERIES and positions[-1] == 1023 and set(positions.diff().tolist()) == {32}
    assert chosen_queries(5, None, torch.device("cpu"))[1].tolist() == [0, 1, 2, 3, 4]


class Names(TorchDispatchMode):
    """Record the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.__name__)
        return function(*args, **(kwargs or {}))


def test_the_host_never_waits_for_the_device(monkeypatch) -> None:
    made = model()
    monitors = monitors_of(made, "activations", "attention", "gradients", "weights", "updates")
    shards = [Shard.whole(name, parameter) for name, parameter in made.named_parameters()]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    chosen_queries(SEQ, None, torch.device("cpu"))  # computed once, on the host
    with Names() as names:
        monitors.begin()
        made(torch.zeros(2, SEQ, dtype=torch.long), torch.zeros(2, SEQ, dtype=torch.long))[0].backward()
        monitors.remove()
        monitors.count_gradients(shards)
        monitors.before_update(shards)
        monitors.after_update(shards)
        monitors.reduce()
    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal.default")
    assert not {name for name in names.seen if name.startswith(waits)}


def test_all_numbers_of_a_step_are_reduced_in_one_collective(monkeypatch) -> None:
    """Simulate two ranks: add the second rank's vector to the first one's, like an all-reduce."""
    made, reduced = model(), list[torch.Tensor]()
    names = [name for name, _ in made.named_parameters()]
    for rank in (0, 1):
        monitors = Monitors(
            ["activations", "attention"], [made], names, n_layers=2, units=24, world=(rank, 2), device=CPU
        )
        monitors.begin()
        made(torch.full((1, SEQ), 3 + rank))
        monitors.remove()
        monkeypatch.setattr(torch.distributed, "all_reduce", reduced.append)
        monitors.reduce()
    first, second = reduced  # one call for each
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vector: vector.add_(first))
    both = monitors.read(monitors.reduce().tolist())
    assert second is not first
    alone = [values_of(made, 3 + rank, monkeypatch) for rank in (0, 1)]
    for layer in ("0", "1"):
        for group, name in (("activations", "max"), ("attention", "max_logit")):
            assert both[group][layer][name] == max(one[group][layer][name] for one in alone)
        mean_square = sum(one["activations"][layer]["rms"] ** 2 for one in alone) / 2
        assert both["activations"][layer]["rms"] == pytest.approx(mean_square**0.5)


def values_of(made: Transformer, token: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monitors = monitors_of(made, "activations", "attention")
    monitors.begin()
    made(torch.full((1, SEQ), token))
    monitors.remove()
    return values(monitors, monkeypatch)


def test_monitors_do_not_change_a_run_and_report_at_their_steps(tmp_path) -> None:
    plain, watched = Run(tmp_path / "plain", *EXPERTS), Run(tmp_path / "watched", *EXPERTS)
    assert plain("--train.steps=5") == 0
    assert watched("--train.steps=5", "--metrics.monitor_interval=2", "--metrics.tensorboard=true") == 0
    lines = watched.metrics()
    assert [line for line in lines if "monitors" not in line] == plain.metrics()
    monitored = {line["step"]: line["monitors"] for line in lines if "monitors" in line}
    assert list(monitored) == [1, 2, 4]
    for groups in monitored.values():
        assert set(groups) >= {"activations", "attention", "gradients", "weights", "updates", "experts"}
        assert set(groups["experts"]["1"]) == {"score_entropy", "load_entropy", "load_max", "load_min"}
        assert len(groups["updates"]) == len(groups["weights"]) == len(groups["gradients"]) > 15
