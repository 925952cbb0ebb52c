"""A node passes only if every result is correct and every rate reaches the required fraction of its planned figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge.runtime.distributed import single_process_group
from forge.runtime.errors import BAD_CONFIG, FAILED, FINISHED
from forge.runtime.world import World
from forge.tools.plan import node
from forge.tools.plan.hardware import find_hardware
from forge.tools.plan.node import ON_CPU, ON_GPU, RankChecks, Timed, attention_flops, measure_rank
from forge.tools.plan.node_report import COMPUTE, LINKS, compare, planned_s, problems_of
from forge.tools.verify.ranks import run_ranks
from tests.support.harness import start_ranks
from tests.support.runs import reserve_port
from tests.support.scripts import run_script
from tests.support.trained import ROOT, call, refusal

H100 = find_hardware("h100")
KERNELS = ["matrix product", "attention", "memory"]
LINK = ["all_reduce in a node", "all_gather in a node", "reduce_scatter in a node", "all_to_all in a node"]
FILE = """
memory_gib = 4.0
memory_gb_per_s = {rate}
cards_per_node = 2
peak_tflops = {{ float32 = {rate} }}
node = {{ gb_per_s = {rate}, latency_us = 0 }}
cluster = {{ gb_per_s = {rate}, latency_us = 0 }}
"""


def check_two_ranks(folder: Path, *options: str) -> tuple[list[int], dict]:
    """Run check_node.py on two CPU ranks; return the exit codes and the JSON object."""
    out, err = folder / "out.txt", folder / "err.txt"
    out.unlink(missing_ok=True)
    port, meeting = reserve_port()
    words = [str(ROOT / "scripts" / "check_node.py"), "--device=cpu", "--json", *options]
    ranks = start_ranks(run_script, 2, words, folder, meeting, out, err)
    ranks.port = port
    return ranks.join(), json.loads(out.read_text())


def test_two_ranks_on_a_cpu_pass_and_list_missing_comparisons(tmp_path) -> None:
    codes, report = check_two_ranks(tmp_path)
    assert codes == [FINISHED, FINISHED] and report["ok"] and report["problems"] == []
    assert [check["name"] for check in report["checks"]] == [*KERNELS, *LINK]
    assert all(check["status"] == "no figure" and check["slowest"] > 0 for check in report["checks"])
    assert [device["rank"] for device in report["devices"]] == [0, 1]


def test_rates_are_compared_with_a_file_of_measured_hardware(tmp_path) -> None:
    """Every CPU exceeds a thousandth of a TFLOP/s and of a GB/s, and none reaches a billion."""
    for rate, codes, status in ((1e-3, [FINISHED, FINISHED], "ok"), (1e9, [FAILED, FAILED], "slow")):
        (tmp_path / "here.toml").write_text(FILE.format(rate=rate))
        found, report = check_two_ranks(tmp_path, "--hardware", str(tmp_path / "here.toml"))
        assert found == codes and {check["status"] for check in report["checks"]} == {status}
    assert len(report["problems"]) == 2 * len(KERNELS) + len(LINK)


def test_without_a_gpu_the_command_ends_with_one_sentence(tmp_path) -> None:
    result = call(tmp_path, "check_node")
    assert result.code == BAD_CONFIG and "this process sees no GPU" in refusal(result)
    result = call(tmp_path, "check_node", "--device=cpu", "--hardware=h100")
    assert result.code == BAD_CONFIG and "--hardware h100: describes a GPU" in refusal(result)


def spoiled(function, element: int):
    """Wrap `function` to change one element of its result, or of its output tensor."""

    def call(*arguments, **options):
        result = function(*arguments, **options)
        if result is None:  # a collective
            arguments[0].view(-1)[element] += 50
        elif "out" in options:
            options["out"].view(-1)[element] += 50
        else:
            result = result.clone()
            with torch.no_grad():
                result.view(-1)[element] += 50
        return result

    return call


@pytest.mark.parametrize(
    ("module", "function", "check"),
    [
        (node.torch, "mm", "_product"),
        (node.F, "scaled_dot_product_attention", "_attention"),
    ],
)
def test_one_wrong_element_of_a_kernel_is_found(monkeypatch, module, function: str, check: str) -> None:
    arguments = (torch.device("cpu"), torch.float32, replace(ON_CPU, least_s=0.0))
    assert getattr(node, check)(*arguments).problem == ""
    monkeypatch.setattr(module, function, spoiled(getattr(module, function), 77))
    assert "wrong result" in getattr(node, check)(*arguments).problem


def test_rounding_of_long_causal_attention_to_bfloat16_is_not_wrong() -> None:
    sizes = replace(ON_CPU, heads=1, seq=4096, head_dim=128, least_s=0.0)
    assert node._attention(torch.device("cpu"), torch.bfloat16, sizes).problem == ""


def test_a_nan_result_is_wrong() -> None:
    exact = torch.ones(4)
    assert node._error(torch.tensor([1.0, float("nan"), 1.0, 1.0]), exact)
    assert node._error(torch.zeros(4), torch.zeros(4))  # a device without computation
    assert not node._error(torch.tensor([1.0, 1.005, 1.0, 1.0]), exact)


def problems_with_one_bad_rank(rank: int, world: int, function: str) -> list[str]:
    if rank == 1:
        setattr(node.dist, function, spoiled(getattr(dist, function), 3))
    local = World(rank, world, rank, "torchrun", local_size=world)
    record = measure_rank(local, replace(ON_CPU, least_s=0.0, calls=2))
    return [name for name, one in record.timed.items() if one.problem]


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
def test_a_collective_with_one_wrong_element_is_named_on_its_rank(kind: str) -> None:
    function = {"all_reduce": "all_reduce", "all_to_all": "all_to_all_single"}[kind]
    good, bad = run_ranks(problems_with_one_bad_rank, 2, function)
    assert good == [] and bad == [f"{kind} in a node"]


def ranks_in_two_nodes(rank: int, world: int) -> list[str]:
    place = World(rank, world, rank % 2, "torchrun", local_size=2)
    record = measure_rank(place, replace(ON_CPU, least_s=0.0, calls=2))
    assert all(one.problem == "" for one in record.timed.values())
    return list(record.timed)


def test_several_nodes_are_checked_one_by_one_and_together() -> None:
    found = run_ranks(ranks_in_two_nodes, 4)
    over = [name.replace("in a node", "over all nodes") for name in LINK]
    assert found == [[*KERNELS, *LINK, *over]] * 4


def test_one_process_has_no_links() -> None:
    with single_process_group():
        assert list(measure_rank(World(0, 1, 0, "python"), ON_CPU).timed) == KERNELS


def records(count: int = 8, slow: float = 1.0) -> list[RankChecks]:
    """Return records of a healthy H100 node at the planned rates. slow: factor on rank 5's time for a matrix product."""
    found = []
    for rank in range(count):
        one = RankChecks(rank, "node1", count, H100.card, 79.1, "580.1", "Enabled", "0")
        for name in (*KERNELS, *LINK):
            seconds = planned_s(name, [one] * count, ON_GPU, H100)
            one.timed[name] = Timed(seconds, amount_of(name, count))
        found.append(one)
    fast = found[5].timed["matrix product"]
    found[5].timed["matrix product"] = replace(fast, seconds=slow * fast.seconds)
    return found


def amount_of(name: str, ranks: int) -> float:
    amounts = {
        "matrix product": 2.0 * ON_GPU.n**3,
        "attention": attention_flops(ON_GPU),
        "memory": 2.0 * ON_GPU.copied,
    }
    twice = 2 if name.startswith("all_reduce") else 1
    return amounts.get(name, twice * ON_GPU.message * (ranks - 1) / ranks)


def problems(found: list[RankChecks], gpus: int = 8) -> list[str]:
    checks = compare(found, H100, ON_GPU, compute=COMPUTE, links=LINKS)
    return problems_of(found, checks, H100, gpus)


def test_the_planned_figures_come_from_the_hardware_file() -> None:
    checks = {check.name: check for check in compare(records(), H100, ON_GPU, compute=COMPUTE, links=LINKS)}
    assert checks["matrix product"].planned == pytest.approx(0.69 * 989.5)
    assert checks["attention"].planned == pytest.approx(0.44 * 989.5)
    assert checks["memory"].planned == pytest.approx(0.81 * 3350)
    # 450 GB/s at 0.59, and 23.3 microseconds of latency and hops.
    seconds = 2 * 7 / 8 * 2**28 / (0.59 * 450e9) + 23.3e-6
    assert checks["all_reduce in a node"].planned == pytest.approx(1.75 * 2**28 / seconds / 1e9)
    assert (COMPUTE, LINKS) == (0.87, 0.71)


def test_a_healthy_node_has_no_problem_and_a_slow_gpu_is_named() -> None:
    assert problems(records()) == [] and problems(records(slow=1.1)) == []
    (problem,) = problems(records(slow=1.3))
    assert problem.startswith(
        "node1, rank 5: matrix product: 525.2 TFLOP/s, below 0.87 times the planned 682.8"
    )


def test_a_slow_link_is_named_once_for_all_its_ranks() -> None:
    found = records()
    for record in found:
        record.timed[LINK[0]] = replace(record.timed[LINK[0]], seconds=2 * record.timed[LINK[0]].seconds)
    (problem,) = problems(found)
    assert problem.startswith("all_reduce in a node: ") and "below 0.71 times the planned" in problem


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "NVIDIA H200"}, "the GPU is NVIDIA H200, expected NVIDIA H100 80GB HBM3"),
        ({"memory_gib": 39.0}, "39.0 GiB of GPU memory, expected 79.1 GiB"),
        ({"uncorrected": "2"}, "2 uncorrected memory errors"),
    ],
)
def test_a_wrong_device_is_named(change: dict, text: str) -> None:
    found = records()
    found[2] = replace(found[2], **change)
    (problem,) = problems(found)
    assert problem.startswith("node1, rank 2: ") and text in problem


def test_a_missing_gpu_is_a_problem_unless_expected() -> None:
    assert problems(records(6), gpus=6) == []
    (problem,) = problems(records(6))
    assert problem.startswith("node1: checked 6 GPUs, expected 8")


@pytest.mark.processes
def test_facts_of_nvidia_smi_are_found_by_uuid(tmp_path, monkeypatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU-0a1b, 580.65.06, Enabled, 0'\necho 'GPU-2c3d, 580.65.06, [N/A], [N/A]'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = node._nvidia_smi()
    assert facts["0a1b"]["driver_version"] == "580.65.06" and facts["0a1b"]["ecc.mode.current"] == "Enabled"
    assert facts["2c3d"]["ecc.errors.uncorrected.volatile.total"] == "[N/A]"
