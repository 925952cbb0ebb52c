"""`train.py --plan`: exit codes, the smallest world size, and models that cannot be planned."""

import json
from typing import Any

import pytest
from torch import Tensor

from forge.config import check_world, parse_toml_text
from forge.model import Transformer
from forge.observe.hardware import GIB
from forge.run.launch import main
from forge.tools.plan import fake
from forge.tools.plan.command import allowed_in_phases
from forge.tools.plan.fake import FakeRank, fake_ranks
from forge.tools.plan.plan import smallest_world
from tests.support.planning import plan_text

HARDWARE = """
memory_gib = {gib}
reserved_gib = 0.0
memory_gb_per_s = 10
cards_per_node = 8
node = {{ gb_per_s = 1, latency_us = 10 }}
cluster = {{ gb_per_s = 1, latency_us = 10 }}
"""


class Reads(Transformer):
    """A model whose forward depends on its data."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + int(x.max().item()), *rest)


def plan(folder, *options: str, gib: float | None = None) -> int:
    (folder / "tiny.toml").write_text(plan_text())
    if gib is not None:
        (folder / "card.toml").write_text(HARDWARE.format(gib=gib))
        options = (*options, f"--hardware={folder / 'card.toml'}")
    return main(["--config", str(folder / "tiny.toml"), "--plan", "--model.n_layers=1", *options])


@pytest.mark.long
def test_a_plan_is_one_json_object_and_nothing_else_is_printed(tmp_path, capsys) -> None:
    assert plan(tmp_path, "--json", "--world-size=2") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is None and found["world_size"] == 2 and found["layout"]["dp_shard"] == 2
    memory = found["memory"]
    parts = (
        memory[kind] for kind in ("parameters", "masters", "gradients", "optimizer", "buckets", "activations")
    )
    assert sum(parts) == memory["peak"] > memory["activations"] > memory["parameters"] > 0
    assert {row["axis"] for row in found["collectives"]} == {"dp_shard"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize(("gib", "code"), [pytest.param(1.0, 0, marks=pytest.mark.slow), (0.0001, 3)])
def test_the_exit_code_depends_on_whether_it_fits(tmp_path, capsys, gib: float, code: int) -> None:
    assert plan(tmp_path, gib=gib) == code
    text = capsys.readouterr().out
    assert ("does not fit" in text) is ("which is still too much" in text) is (code == 3)


@pytest.mark.slow
def test_an_oversized_plan_names_keys_that_free_enough_memory(tmp_path, capsys) -> None:
    def found(gib: float, *options: str) -> dict[str, Any]:
        plan(tmp_path, "--json", *options, gib=gib)
        return json.loads(capsys.readouterr().out)

    whole = found(1.0)
    assert whole["remedy"] is None
    short = found(0.9 * whole["memory"]["peak"] / 2**30)
    overrides = short["remedy"]["overrides"]
    assert not short["fits"] and short["remedy"]["needed"] < short["memory"]["peak"]
    assert found(1.0, *overrides)["memory"]["peak"] == short["remedy"]["needed"]


@pytest.mark.long
def test_a_node_must_have_the_host_memory_of_its_ranks(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(fake, "LEAST", 0)
    node = tmp_path / "node.toml"
    asked = ("--world-size=2", "--model.n_layers=3", f"--hardware={node}")
    asked = (*asked, "--activation_checkpoint.mode=offload")

    def exit_code(host_gib: float, *options: str) -> int:
        node.write_text(f'card = "any"\nhost_memory_gib = {host_gib:.12f}\n' + HARDWARE.format(gib=1.0))
        return plan(tmp_path, *asked, *options)

    assert exit_code(0.0, "--json") == 0, "unknown host memory is not compared"
    found = json.loads(capsys.readouterr().out)
    needed = found["host_bytes_of_node"]
    (stage,) = found["stages"]
    assert needed == 2 * (stage["host_bytes_of_activations"] + stage["host_bytes_of_save"])
    assert stage["host_bytes_of_activations"] > 0
    assert exit_code((needed + 1) / GIB) == 0 and "of a node's host memory" not in capsys.readouterr().out
    assert exit_code((needed - 1) / GIB) == 3 and "of a node's host memory" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_includes_the_memory_of_crowded_experts(tmp_path, capsys) -> None:
    experts = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\nexpert_dim = 24\n"
    (tmp_path / "experts.toml").write_text(plan_text("ep = 2", model=experts).replace("n_kv_heads = 2\n", ""))
    assert main(["--config", str(tmp_path / "experts.toml"), "--plan", "--world-size=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] < found["needed_when_crowded"] < 2 * found["memory"]["peak"]
    (exchange,) = (row for row in found["collectives"] if row["kind"] == "all_to_all" and row["axis"] == "ep")
    assert not exchange["can_be_hidden"]
    assert (
        found["checkpoint_bytes"] > found["stages"][0]["host_bytes_of_save"] > found["checkpoint_bytes"] / 3
    )
    assert found["stages"][0]["host_bytes_of_local_states"] == 0
    # The loss computes its gradient in forward.
    assert set(found["flops"]["forward"]) == {"layers", "attention", "head"} > set(found["flops"]["backward"])


@pytest.mark.long
def test_states_on_the_nodes_take_host_memory_for_three_of_them_with_their_copies(tmp_path, capsys) -> None:
    (tmp_path / "plain.toml").write_text(plan_text())
    asked = ["--config", str(tmp_path / "plain.toml"), "--plan", "--world-size=2", "--model.n_layers=1"]
    kept = ["--checkpoint.local_interval=5", "--checkpoint.peers=2"]
    assert main([*asked, *kept, "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    assert stage["host_bytes_of_local_states"] == (3 * 3 + 1) * stage["host_bytes_of_save"] > 0
    assert main([*asked, *kept]) == 0
    assert "states on the nodes (checkpoint.local_interval) take" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("loss",), ["compile.loss"]),
        (("enabled", "loss"), ["compile.enabled and compile.loss"]),
        (("optimizer",), ["compile.optimizer"]),
    ],
)
def test_what_is_compiled_is_planned_without_the_compiler(tmp_path, capsys, keys, named: list[str]) -> None:
    def found(*options: str) -> dict[str, Any]:
        assert plan(tmp_path, "--json", *options) == 0
        return json.loads(capsys.readouterr().out)

    compiled = found(*(f"--compile.{key}=true" for key in keys))
    assert [line.partition(":")[0] for line in compiled["warnings"] if line.startswith("compile.")] == named
    assert compiled["memory"] == found()["memory"]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ["--parallel.data_parallel=zero1", "--parallel.check_gradients=finite"],
        ["--parallel.data_parallel=zero1", "--parallel.symmetric_memory=true"],
        ["--parallel.tp=2", "--compile.enabled=true", "--parallel.async_tp=true"],
        ["--model.n_layers=9", '--optimizer.groups=[{names=["layers.7.*"],lr_scale=0.5}]'],
        ["--model.n_layers=9", '--precision.fp32_modules=["layers.7"]'],
    ],
)
def test_what_a_plan_cannot_trace_is_still_planned(tmp_path, capsys, options: list[str]) -> None:
    assert plan(tmp_path, "--world-size=2", "--json", *options) == 0
    warnings = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert ("check_gradients" in warnings) == ("check_gradients" in options[-1])


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--world-size=3", "must be a multiple of"),
        ("--hardware=h10", 'did you mean "h100"?'),
        ("--search", "needs --world-size and --hardware"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(tmp_path, capfd, option: str, part: str) -> None:
    assert plan(tmp_path, option) == 2
    assert part in capfd.readouterr().err


def test_every_phase_must_fit_the_processes(tmp_path, capfd) -> None:
    options = ["--train.global_batch_size=8", "--train.micro_batch_size=1", "--world-size=8"]
    phase = "--phase=[{until_tokens=512,global_batch_size=4},{}]"
    assert plan(tmp_path, *options, phase) == 2
    assert "phase 1" in capfd.readouterr().err
    found = plan(tmp_path, *options, phase, "--parallel.fallbacks=['parallel.tp=2']", "--json")
    printed = capfd.readouterr()
    assert found == 0 and "8 processes need this entry of parallel.fallbacks: parallel.tp=2" in printed.err
    assert json.loads(printed.out)["layout"]["tp"] == 2


@pytest.mark.long
def test_a_remedy_names_no_key_that_a_phase_overrides(tmp_path, capsys) -> None:
    options = ["--train.micro_batch_size=1", "--json", "--world-size=1"]
    phase = "--phase=[{until_tokens=2048,seq_len=40},{micro_batch_size=4}]"
    plan(tmp_path, *options, phase, gib=1.0)
    peak = json.loads(capsys.readouterr().out)["memory"]["peak"]
    assert plan(tmp_path, *options, phase, gib=0.9 * peak / 2**30) == 3
    remedy = json.loads(capsys.readouterr().out)["remedy"]
    assert remedy and not any("micro_batch_size" in one for one in remedy["overrides"])


def test_a_change_is_allowed_if_no_phase_overrides_it() -> None:
    text = plan_text() + "[[phase]]\nuntil_tokens = 2048\nseq_len = 40\n[[phase]]\nmicro_batch_size = 4\n"
    allowed = allowed_in_phases(parse_toml_text(text), 1)
    assert not allowed({"train.micro_batch_size": 1})
    assert allowed({"activation_checkpoint.mode": "full"})
    assert not allowed_in_phases(parse_toml_text(text), 3)({})


def test_the_largest_phase_is_planned_with_its_number_of_microbatches(tmp_path, capsys) -> None:
    options = ("--json", "--world-size=1", "--train.micro_batch_size=1")
    plan(
        tmp_path,
        *options,
        "--train.global_batch_size=4",
        "--phase=[{until_tokens=640},{global_batch_size=8}]",
        gib=1.0,
    )
    phased = json.loads(capsys.readouterr().out)
    plan(tmp_path, *options, "--train.global_batch_size=8", gib=1.0)
    plain = json.loads(capsys.readouterr().out)
    assert phased["time"]["step_s"] == pytest.approx(plain["time"]["step_s"])
    assert phased["time"]["tokens_per_second"] == pytest.approx(plain["time"]["tokens_per_second"])


def test_an_invalid_hardware_file_is_refused(tmp_path, capfd) -> None:
    assert plan(tmp_path, gib=-1) == 2
    assert "memory_gib" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("parallel", "world"),
    [("", 1), ("tp = 2", 2), ("dp_shard = 4\ncp = 2", 8), ("ep = 4\ntp = 2", 4)],
)
def test_the_smallest_world_is_the_first_valid_one(parallel: str, world: int) -> None:
    experts = "n_kv_heads = 4\n[model.moe]\nn_experts = 4\nexpert_dim = 24\n"
    text = plan_text(parallel, model=experts).replace("n_kv_heads = 2\n", "")
    assert smallest_world(parse_toml_text(text)).world == world


def test_a_model_reading_tensor_values_is_refused_with_its_line(tmp_path, capfd) -> None:
    assert plan(tmp_path, "--model.kind=tests.tools.plan.test_command:Reads") == 2
    message = capfd.readouterr().err
    assert f"{__file__}:" in message and "aten._local_scalar_dense" in message


@pytest.mark.long
def test_ranks_of_one_process_do_not_disturb_each_other() -> None:
    """Equal meshes of two worlds have different groups."""
    config = parse_toml_text(plan_text("pp = 2"))
    for rank in (0, 2):
        with fake_ranks(rank, 4):
            FakeRank(config, check_world(config, 4)).step(4)
