"""Compute dtypes of parameters, and the resulting FSDP units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from forge.config import parse_toml_text
from forge.parallel.build import build_meta_model
from forge.parallel.precision import (
    DTYPES,
    Unit,
    cast_at_borders,
    joined_by_parameters,
    matches_any_depth,
    maximal_subtrees,
    pinned_parameters,
    plan_units,
    uniform_units,
)
from forge.runtime.errors import UserError
from tests.support.equivalence import tiny_config

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Net(nn.Module):
    """A module with children by keyword. The tests never call them."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def linear(size: int = 4) -> nn.Linear:
    return nn.Linear(size, size, bias=False, device="meta")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*.router", "layers.3.feed_forward.router", True),
        ("*.router", "router", False),
        ("*.gate", "layers.0.feed_forward.gate_proj", False),
        ("gate", "layers.0.gate", False),
        ("layers.*.attention_norm", "layers.11.attention_norm", True),
        ("layers.*.attention_norm", "layers.11.attention_norm.inner", False),
        ("layers.[01].*norm", "layers.1.ffn_norm", True),
        ("layers.[01].*norm", "layers.2.ffn_norm", False),
        ("layers.[01].*norm", "layers.1.attention.q_norm", False),
        ("layers.1*", "layers.12", True),
        ("norm", "norm", True),
        ("norm", "layers.0.norm", False),
        ("head", "header", False),
    ],
)
def test_patterns_are_whole_names_with_a_glob_for_each_component(pattern, name, expected) -> None:
    assert matches_any_depth(pattern, name) is expected


def test_pins_are_the_parameters_under_the_matched_modules() -> None:
    net = Net(a=Net(router=linear()), b=linear())
    assert pinned_parameters(net, ["*.router"]) == {net.a.router.weight}
    assert pinned_parameters(net, ["a", "b"]) == set(net.parameters())


def test_the_default_pin_may_match_nothing_a_users_may_not() -> None:
    net = Net(attention=linear(), norm=linear())
    assert pinned_parameters(net, ["*.router"]) == set()
    with pytest.raises(UserError, match=r"'atention' matches no module .* nearest name is 'attention'"):
        pinned_parameters(net, ["atention"])


def test_the_nearest_name_covers_all_layers() -> None:
    config = parse_toml_text(
        tiny_config().replace("[precision]", '[precision]\nfp32_modules = ["attention_norm"]')
    )
    with pytest.raises(UserError, match=r"nearest name is 'layers\.\*\.attention_norm'") as error:
        plan_units(build_meta_model(config), config.precision)
    assert error.value.exit_code == 2


# The largest subtrees of one key.


def subtrees(net: nn.Module, **keys: Any) -> list[tuple[str, Any]]:
    """Return subtrees by name. keys: prefixes of parameter names, with underscores for dots."""
    of = {
        p: next(key for prefix, key in keys.items() if name.replace(".", "_").startswith(prefix))
        for name, p in net.named_parameters()
        if any(name.replace(".", "_").startswith(prefix) for prefix in keys)
    }
    names = {module: name for name, module in net.named_modules()}
    return [(names[module], key) for module, key in maximal_subtrees(net, of)]


def test_one_key_throughout_is_the_root() -> None:
    assert subtrees(Net(a=linear(), b=Net(c=linear())), a=1, b=1) == [("", 1)]


def test_subtrees_are_as_large_as_can_be_and_in_order() -> None:
    net = Net(a=linear(), b=Net(c=linear(), d=Net(e=linear(), f=linear())), g=linear())
    assert subtrees(net, a=1, b=2, g=1) == [("a", 1), ("b", 2), ("g", 1)]
    assert subtrees(net, a=1, b_c=1, b_d=2, g=1) == [("a", 1), ("b.c", 1), ("b.d", 2), ("g", 1)]


def test_subtrees_without_parameters_or_keys_do_not_count() -> None:
    net = Net(a=linear(), empty=nn.Identity(), skipped=linear())
    assert subtrees(net, a=1) == [("", 1)]
    assert subtrees(Net(empty=nn.Identity())) == []


def test_buffers_do_not_count() -> None:
    net = Net(a=linear(), b=linear())
    net.a.register_buffer("table", torch.zeros(2, dtype=F64))
    assert subtrees(net, a=1, b=1) == [("", 1)]


def test_a_never_called_module_is_replaced_by_its_children() -> None:
    net = Net(a=nn.ModuleList([linear(), linear()]), b=linear())
    assert subtrees(net, a=1, b=2) == [("a.0", 1), ("a.1", 1), ("b", 2)]


# Units.


def units(
    net: nn.Module,
    *,
    pinned: Collection[nn.Parameter] = (),
    ignored: Collection[nn.Parameter] = (),
    changed: dict[nn.Parameter, torch.dtype] | None = None,
) -> list[tuple[list[str], torch.dtype]]:
    """Return the units of `net` as names of their modules. changed: compute dtypes that override the rules."""
    names = {module: name for name, module in net.named_modules()}
    dtypes = {p: F32 if p in pinned else BF16 for p in net.parameters() if p not in set(ignored)}
    made = uniform_units([net], dtypes | (changed or {}))
    return [([names[m] for m in unit.modules], unit.compute) for unit in made]


def test_one_dtype_is_one_unit() -> None:
    assert units(Net(a=linear(), b=linear())) == [([""], BF16)]


def test_of_two_dtypes_the_rarer_is_split_off_whichever_it_is() -> None:
    net = Net(a=linear(2), b=linear(8), c=linear(2))
    assert units(net, pinned={net.a.weight, net.c.weight}) == [(["a"], F32), (["c"], F32), ([""], BF16)]
    assert units(net, pinned={net.b.weight}) == [(["a"], BF16), (["c"], BF16), ([""], F32)]


def test_rarer_is_counted_in_elements_and_a_tie_goes_to_the_first() -> None:
    net = Net(a=linear(8), b=linear(2), c=linear(2))
    assert units(net, pinned={net.a.weight}) == [(["b"], BF16), (["c"], BF16), ([""], F32)]
    tie = Net(a=linear(), b=linear())
    assert units(tie, pinned={tie.b.weight}) == [(["a"], BF16), ([""], F32)]


def test_all_dtypes_but_the_most_frequent_are_split_off() -> None:
    net = Net(a=linear(), b=Net(c=linear(), d=linear()), e=linear())
    found = units(net, pinned={net.a.weight}, changed={net.e.weight: F64})
    assert found == [(["a"], F32), (["e"], F64), ([""], BF16)]


def test_parameters_apart_are_in_no_unit_of_the_others() -> None:
    net = Net(a=linear(), experts=linear(), b=linear())
    dtypes = {net.a.weight: F32, net.experts.weight: BF16, net.b.weight: BF16}
    found = uniform_units([net], dtypes, apart={net.experts.weight})
    assert [(unit.modules, unit.compute) for unit in found] == [((net.a,), F32), ((net,), BF16)]


def test_ignored_parameters_are_in_no_unit() -> None:
    net = Net(a=linear(), b=linear(), c=linear(), d=linear())
    others = {net.c.weight, net.d.weight}
    found = units(net, pinned={net.a.weight}, ignored=others, changed={net.b.weight: F64})
    assert found == [(["a"], F32), ([""], F64)]
    assert units(net, ignored=set(net.parameters())) == []


def test_a_containers_children_become_units() -> None:
    net = Net(a=nn.ModuleList([linear(2), linear(2)]), b=linear(8))
    assert units(net, pinned=set(net.a.parameters())) == [
        (["a.0"], F32),
        (["a.1"], F32),
        ([""], BF16),
    ]


def test_parameters_of_one_module_cannot_be_divided() -> None:
    mixed = nn.Linear(4, 4, device="meta")
    with pytest.raises(UserError, match=r"a\.bias of Net cannot compute in another dtype .* separate module"):
        units(Net(a=mixed, b=linear()), pinned={mixed.bias})


def test_the_owner_of_a_parameter_can_be_divided_from_its_children() -> None:
    net = Net(a=linear(8))
    net.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(UserError, match="scale of Net cannot"):
        units(net, pinned={net.scale})
    assert units(net, pinned={net.a.weight, net.scale}) == [([""], F32)]


class Double(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0, dtype=dtype))
        self.took: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.took += [x.dtype, labels.dtype]
        return self.weight * x, labels


def test_a_module_in_another_dtype_takes_and_returns_the_stream_around_it() -> None:
    net = Net(a=Double(F32), b=Double(BF16), router=Double(F32))
    net.router.exact_output = True
    dtypes = {net.a.weight: F32, net.b.weight: BF16, net.router.weight: F32}
    cast_at_borders(net, dtypes, BF16)
    for module, inside, outside in ((net.a, F32, BF16), (net.b, BF16, BF16), (net.router, F32, F32)):
        output, labels = module(torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64))
        assert module.took == [inside, torch.int64]
        assert (output.dtype, labels.dtype) == (outside, torch.int64)


def test_shared_parameters_are_in_one_unit() -> None:
    net = Net(a=linear(2), b=linear(8), c=linear(2), d=linear(2))
    net.c.weight = net.a.weight
    assert units(net, pinned={net.a.weight, net.d.weight}) == [
        (["a", "c"], F32),
        (["d"], F32),
        ([""], BF16),
    ]
    a, b, c, d = [linear()], [linear()], [linear()], [linear()]
    assert joined_by_parameters([a, b, c, d]) == [a, b, c, d]
    c[0].weight, d[0].weight = a[0].weight, a[0].weight
    assert joined_by_parameters([a, b, c, d]) == [[*a, *c, *d], b]
    bridge = Net(x=a[0], y=b[0])
    assert joined_by_parameters([a, b, [bridge], c]) == [[*a, *b, bridge, *c]]


# Whole models.


def groups(
    model: str = "", precision: str = "", *, experts_apart: bool = True
) -> list[list[tuple[list[str], torch.dtype]]]:
    text = tiny_config(model=model).replace('"float64"', '"float32"')
    text = text.replace('compute = "float32"', 'compute = "bfloat16"')
    config = parse_toml_text(text.replace("[precision]", f"[precision]\n{precision}"))
    net = build_meta_model(config)
    names = {module: name or "root" for name, module in net.named_modules()}

    def summary(unit: Unit) -> tuple[list[str], torch.dtype]:
        return [names[module] for module in unit.modules], unit.compute

    return [
        [summary(unit) for unit in group]
        for group in plan_units(net, config.precision, experts_apart=experts_apart)[0]
    ]


@pytest.mark.parametrize(
    ("compute", "pinned"), [("bfloat16", F32), ("float32", F32), ("float64", F64)], ids=str
)
def test_pins_compute_in_the_wider_of_float32_and_the_policy(compute: str, pinned: torch.dtype) -> None:
    text = tiny_config().replace('compute = "float64"', f'compute = "{compute}"')
    config = parse_toml_text(text.replace("[precision]", '[precision]\nfp32_modules = ["head"]'))
    net = build_meta_model(config)
    table = nn.Parameter(torch.zeros(3, dtype=torch.int64, device="meta"), requires_grad=False)
    net.register_parameter("table", table)
    dtypes = plan_units(net, config.precision)[1]
    assert set(dtypes) == set(net.parameters())
    assert dtypes.pop(net.head.weight) == pinned
    assert dtypes.pop(table) == torch.int64, "not a floating-point dtype"
    assert set(dtypes.values()) == {DTYPES[compute]}


def test_units_of_a_model_in_one_dtype() -> None:
    layers = [[([f"layers.{i}"], BF16)] for i in range(3)]
    root = [(["root"], BF16)]
    assert groups() == [[(["embedding"], BF16)], *layers, [(["norm", "head"], BF16)], root]
    assert groups("tie_embeddings = true") == [*layers, [(["norm"], BF16)], root]


def test_units_of_a_model_with_pins_inside_and_at_its_ends() -> None:
    found = groups(precision='fp32_modules = ["layers.0", "layers.*.attention_norm", "head"]')
    assert found[1] == [(["layers.0"], F32)]
    assert found[2] == [(["layers.1.attention_norm"], F32), (["layers.1"], BF16)]
    assert found[4] == [(["norm"], BF16), (["head"], F32)]
    tied = groups("tie_embeddings = true", 'fp32_modules = ["embedding"]')
    assert tied[-1] == [(["root"], F32)]


def test_experts_are_in_the_unit_of_their_block_unless_apart_or_in_another_dtype() -> None:
    moe = "[model.moe]\nn_experts = 4\ntop_k = 2\nexpert_dim = 64"
    experts, rest = "layers.1.feed_forward.experts", (["layers.1"], BF16)
    router = (["layers.1.feed_forward.router"], F32)
    assert groups(moe, experts_apart=False)[2] == [router, rest]
    assert sorted(groups(moe)[2], key=str) == sorted([([experts], BF16), router, rest], key=str)
    pinned = groups(moe, 'fp32_modules = ["*.experts", "*.router"]', experts_apart=False)[2]
    assert sorted(pinned, key=str) == sorted([([experts], F32), router, rest], key=str)


def test_tied_weights_of_two_modules_are_one_unit() -> None:
    config = parse_toml_text(tiny_config())
    net = build_meta_model(config)
    net.head.weight = net.embedding.weight
    first = plan_units(net, config.precision)[0][0]
    assert [unit.modules for unit in first] == [(net.embedding, net.norm, net.head)]


def test_decays_of_linear_attention_compute_in_float32_by_default() -> None:
    """Decays are exponentials. Rounding their logarithms to bfloat16 would change decays by up to 2 %."""
    model = """layer_pattern = ["linear"]
    [model.linear_attention]
    n_key_heads = 2
    n_value_heads = 4
    key_head_dim = 8
    value_head_dim = 6
    """
    config = parse_toml_text(tiny_config(model=model).replace('compute = "float64"', 'compute = "bfloat16"'))
    built = build_meta_model(config)
    _, dtypes = plan_units(built, config.precision)
    found = {name: dtypes[p] for name, p in built.named_parameters() if ".decay." in name}
    assert len(found) == 6 and set(found.values()) == {F32}
