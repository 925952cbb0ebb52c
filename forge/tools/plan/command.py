"""`train.py --config X --plan`: print a plan and return an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from forge.config import CommandLine, Config, Phases, check_world, choose_layout
from forge.config.phases import variants
from forge.runtime.errors import DOES_NOT_FIT, FINISHED, UserError
from forge.runtime.terminal import print_result
from forge.tools.plan.advice import remedy_for
from forge.tools.plan.hardware import Hardware, find_hardware
from forge.tools.plan.layouts import Changes, with_changes
from forge.tools.plan.plan import Plan, crowded_bytes, make_plan, smallest_world
from forge.tools.plan.search import BEST, fewest_ranks, search
from forge.tools.plan.show import (
    as_json,
    as_text,
    layout_as_json,
    remedy_as_json,
    remedy_as_text,
    search_as_text,
)


def plan(config: Config, command: CommandLine) -> int:
    """Print the plan of `config` or, with --search, the best layouts. Return the exit code.

    The code is DOES_NOT_FIT if the hardware is known and has too little memory. Otherwise the code is FINISHED.

    Raises UserError (exit 2) for an invalid layout or an unknown name of hardware.
    """
    hardware = None if command.hardware is None else find_hardware(command.hardware)
    world = command.world_size
    if command.search:
        if hardware is None or world is None:
            raise UserError(
                "--search: needs --world-size and --hardware, such as --world-size 64 --hardware h100"
            )
        return _search(config, world, hardware, as_object=command.json)
    # Every phase must be legal. The numbers are those of the largest.
    if world is None:
        degrees = smallest_world(config)
    else:
        config, degrees, fallback = choose_layout(command, config, world)
        if fallback:
            print(f"{world} processes need this entry of parallel.fallbacks: {fallback}", file=sys.stderr)
    whole, config = config, largest(config)
    degrees = check_world(config, degrees.world)  # with the number of microbatches of the largest phase
    made = make_plan(config, degrees, hardware)
    crowded = crowded_bytes(config, degrees, hardware)
    remedy = remedy_for(made, allowed_in_phases(whole, degrees.world)) if made.fits is False else None
    if command.json:
        of_phases = {"steps": whole.train.steps, "phases": phases_as_json(whole)} if whole.phase else {}
        print_result(json.dumps(as_json(made, crowded, remedy) | of_phases, indent=1))
    else:
        of_phases_text = f"\n\n{phases_as_text(whole, made)}" if whole.phase else ""
        print_result(as_text(made, crowded, remedy) + of_phases_text)
    return DOES_NOT_FIT if made.fits is False else FINISHED


def _search(whole: Config, world: int, hardware: Hardware, *, as_object: bool) -> int:
    config, allowed = largest(whole), partial(allowed_in_phases, whole)
    found = search(config, world, hardware, allowed=allowed(world))
    fits = found[0].fits
    fewest = None if fits else fewest_ranks(config, world, hardware, allowed=allowed)
    own = found[0].changes
    remedy = None if fits else remedy_for(found[0].plan, lambda changes: allowed(world)(own | changes))
    if as_object:
        layouts = [layout_as_json(one) for one in found[:BEST]]
        answer = layouts[0] | {
            "layouts": layouts,
            "fewest_processes": fewest,
            "remedy": remedy_as_json(remedy),
        }
        print_result(json.dumps(answer, indent=1))
    else:
        print_result(search_as_text(config, world, hardware, found[:BEST], fewest))
        if remedy is not None:
            print_result(remedy_as_text(remedy, hardware))
    return FINISHED if fits else DOES_NOT_FIT


def allowed_in_phases(whole: Config, world: int) -> Callable[[Changes], bool]:
    """Return a function: whether changes are legal in every phase, and change the largest phase as they change its plan."""

    def allowed(changes: Changes) -> bool:
        changed = with_changes(whole, changes)
        try:
            check_world(changed, world)
        except UserError:
            return False
        return step_sizes(largest(changed)) == step_sizes(with_changes(largest(whole), changes))

    return allowed if whole.phase else lambda changes: True


def step_sizes(config: Config) -> tuple[int, int, int]:
    """Return microbatch size, sequence length and batch size of `config`, without phases."""
    train = config.train
    return train.micro_batch_size, train.seq_len, train.global_batch_size


def largest(config: Config) -> Config:
    """Return `config` without phases, with the step sizes of the phase that needs the most memory.

    This is the phase with the largest microbatch. train.steps becomes the run's tokens divided by the tokens of a step in
    this phase, rounded up. A `config` without phases is returned unchanged.
    """
    if not config.phase:
        return config
    sizes = [config.model_copy(update={"phase": ()}), *(variant for _, variant in variants(config))]
    chosen = max(sizes, key=lambda c: (c.train.micro_batch_size * c.train.seq_len, c.train.global_batch_size))
    per_step = chosen.train.global_batch_size * chosen.train.seq_len
    steps = -(-Phases(config).tokens_after(config.train.steps) // per_step)
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"steps": steps})})


def phases_as_json(config: Config) -> list[dict[str, Any]]:
    """Return one object per phase of the run: its first token, its first step and its step sizes."""
    phases, total = Phases(config), Phases(config).tokens_after(config.train.steps)
    return [
        {
            "from_token": first,
            "from_step": phases.steps_to(first) + 1,
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "seq_len": plan.seq_len,
            "lr": plan.lr,
        }
        for first, plan in phases.stretches()
        if first < total
    ]


def phases_as_text(config: Config, plan: Plan) -> str:
    """Return a heading and one line per phase. The heading names the steps to which the plan's numbers apply."""
    lines = [
        f"  from token {one['from_token']:,} (step {one['from_step']:,}): {one['global_batch_size']} sequences of "
        f"{one['seq_len']} tokens, microbatches of {one['micro_batch_size']}, peak learning rate {one['lr']:.3g}"
        for one in phases_as_json(config)
    ]
    train, total = plan.config.train, Phases(config).tokens_after(config.train.steps)
    head = (
        f"phases: {config.train.steps:,} steps and {total:,} tokens in all. The numbers above are for {train.steps:,} "
        f"steps of {train.global_batch_size} sequences of {train.seq_len} tokens:"
    )
    return "\n".join([head, *lines])
