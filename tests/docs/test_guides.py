"""Guides mark their unrun commands, and their planned figures match the plans they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forge.config import check_world, load_config
from forge.observe.hardware import GIB
from forge.parallel.build import build_meta_model
from forge.tools.plan.hardware import find_hardware
from forge.tools.plan.plan import make_plan
from forge.tools.plan.show import as_json
from tests.support.pages import REPOSITORY

GUIDES = [REPOSITORY / "docs" / "guides" / name for name in ("one-node.md", "cluster.md", "fineweb.md")]
ONE_NODE, CLUSTER, FINEWEB = (path.read_text("utf-8") for path in GUIDES)
guides = pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.name)


@guides
def test_a_guide_begins_with_its_purpose(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.split("\n\n")[1].startswith("After this page you can")
    assert "No figure on this page was measured on a GPU" in text


@guides
def test_unrun_commands_are_marked_for_the_reader(page: Path) -> None:
    """The comment above a block is for the tests. The sentence before it is for the reader."""
    for before in re.findall(r"(?s)(.*?)<!-- not run", page.read_text("utf-8")):
        assert "*Not run: " in before.rpartition("```\n")[2], before[-300:]


def plan(name: str, world: int, *options: str) -> dict[str, Any]:
    config = load_config(["--config", name, *options])
    return as_json(make_plan(config, check_world(config, world), find_hardware("h100")))


def needed(found: dict[str, Any]) -> float:
    return (found["memory"]["peak"] + found["memory"]["other"]) / GIB


def assert_quoted(page: str, *texts: str) -> None:
    words = " ".join(page.split())
    assert [text for text in texts if text not in words] == []


def step_of(found: dict[str, Any]) -> str:
    time = found["time"]
    return f"{time['step_s']:.2f} s ({time['step_s_low']:.2f} to {time['step_s_high']:.2f})"


@pytest.mark.slow
def test_figures_of_one_node_are_planned() -> None:
    found = plan("1b", 8)
    time, host = found["time"], found["stages"][0]["host_bytes_of_save"] / GIB
    low, middle, high = (50_000 * time[key] / 3600 for key in ("step_s_low", "step_s", "step_s_high"))
    assert_quoted(
        ONE_NODE,
        f"{middle:.0f} hours ({low:.0f} to {high:.0f}) | 50,000 steps of {step_of(found)}",
        f"{50_000 * found['tokens_per_step'] / 1e9:.1f} billion, at {time['tokens_per_second']:,.0f} tokens/s",
        f"{needed(found):.1f} of 79.1 GiB",
        f"{8 * host:.1f} GiB | {host:.2f} GiB for each of 8 processes",
        f"{8 * found['checkpoint_bytes'] / GIB:.0f} GiB | 8 checkpoints of {found['checkpoint_bytes'] / GIB:.1f} GiB",
        f"{4 * 50_000 * found['tokens_per_step'] / 1e9:.0f} GB",
        f"{1_000 * time['step_s'] / 60:.0f} minutes",
    )
    larger = plan("1b", 8, "--train.micro_batch_size=8")
    rate = larger["time"]["tokens_per_second"]
    assert_quoted(ONE_NODE, f"{needed(larger):.1f} GiB and {rate:,.0f} tokens/s (")


@pytest.mark.slow
def test_figures_of_fineweb_are_those_of_its_command() -> None:
    command = re.search(r"(?s)torchrun .* train\.py --config (.*?)```", FINEWEB)
    assert command is not None
    name, *options = shlex.split(command[1].replace("\\\n", " "))
    found = plan(name, 8, *options)
    model = build_meta_model(load_config(["--config", name, *options]))
    time, steps = found["time"], 5000
    minutes = [steps * time[key] / 60 for key in ("step_s", "step_s_low", "step_s_high")]
    assert_quoted(
        FINEWEB,
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million |",
        f"{steps:,} steps of {found['tokens_per_step']:,} tokens: {steps * found['tokens_per_step'] / 1e9:.1f} billion",
        f"| {step_of(found)} |",
        "| {:.0f} minutes ({:.0f} to {:.0f}) |".format(*minutes),
        f"| {needed(found):.1f} of 79.1 GiB |",
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4, 16, 64])
def test_figures_of_the_cluster_are_planned(replicas: int) -> None:
    found = plan("13b", 512, f"--parallel.dp_replicate={replicas}", "--checkpoint.local_interval=50")
    row = (replicas, 64 // replicas, f"{needed(found):.1f}", f"{found['time']['step_s']:.2f}")
    nic = sum(gib_through_a_nic(one, 512 // replicas, replicas) for one in found["stages"][0]["collectives"])
    assert_quoted(CLUSTER, f"| {' | '.join(map(str, row))} | {nic:.1f} |")
    if replicas != 64:
        return
    time, local = found["time"], found["stages"][0]["host_bytes_of_local_states"] / GIB
    low, middle, high = (300_000 * time[key] / 86_400 for key in ("step_s_low", "step_s", "step_s_high"))
    checkpoint = found["checkpoint_bytes"] / GIB
    assert_quoted(
        CLUSTER,
        f"{middle:.1f} days ({low:.1f} to {high:.1f}) | 300,000 steps of {step_of(found)}",
        f"at {time['tokens_per_second']:,.0f} tokens/s",
        f"300,000 steps of {found['tokens_per_step']:,} tokens",
        f"{needed(found):.1f} of 79.1 GiB",
        f"| {checkpoint:.1f} GiB |",
        f"{15 * checkpoint / 1024:.1f} TiB | 15 checkpoints, {checkpoint:.1f} GiB each",
        f"{8 * local:.0f} GiB | {local:.2f} GiB for each of 8 ranks",
        f"{300_000 * found['tokens_per_step'] * 4 / 1e12:.1f} TB",
        f"up to {16 * 4 * time['tokens_per_second'] / 1e6:.0f} MB/s",
        f"about {time['tokens_per_second'] / 4096:.0f} samples per second",
        f"| 1,000 | {1_000 * time['step_s'] / 60:.0f} |",
        f"| 50 | {50 * time['step_s'] / 60:.1f} |",
    )


def gib_through_a_nic(call: dict[str, Any], shards: int, replicas: int) -> float:
    """Return GiB per NIC by the page's formula: bytes * (n - 1) / n, twice for an all-reduce, over NICs; 0 within a node."""
    span = re.fullmatch(r"(\d+) nodes, (\d+) NICs? each", call["over"] or "")
    if span is None:
        return 0.0
    ranks = {"dp_shard": shards, "dp_replicate": replicas}.get(call["axis"], 512)
    twice = 2 if call["kind"] == "all_reduce" else 1
    return twice * call["bytes"] * (ranks - 1) / ranks / int(span[2]) / GIB
