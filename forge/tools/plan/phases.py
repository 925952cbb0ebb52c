"""Plans of runs with phases: memory and time of the largest steps, and what each phase takes."""

from __future__ import annotations

from typing import Any

from forge.config import Config, Phases
from forge.config.phases import variants
from forge.tools.plan.plan import Plan


def largest(config: Config) -> Config:
    """Return `config` without phases, with steps of the sizes that need most memory, as many as have its tokens.

    That is those with the largest microbatch. Without phases, `config` itself.
    """
    if not config.phase:
        return config
    sizes = [config.model_copy(update={"phase": ()}), *(variant for _, variant in variants(config))]
    chosen = max(sizes, key=lambda c: (c.train.micro_batch_size * c.train.seq_len, c.train.global_batch_size))
    per_step = chosen.train.global_batch_size * chosen.train.seq_len
    steps = -(-Phases(config).tokens_after(config.train.steps) // per_step)
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"steps": steps})})


def phases_as_json(config: Config) -> list[dict[str, Any]]:
    """Return first token and step, and the sizes of steps, of each stretch of the run."""
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
    """Return a line for each phase, and what the numbers above are of."""
    lines = [
        f"  from token {one['from_token']:,} (step {one['from_step']:,}): {one['global_batch_size']} sequences of "
        f"{one['seq_len']} tokens, microbatches of {one['micro_batch_size']}, peak learning rate {one['lr']:.3g}"
        for one in phases_as_json(config)
    ]
    train, total = plan.config.train, Phases(config).tokens_after(config.train.steps)
    head = (
        f"phases, {config.train.steps:,} steps and {total:,} tokens in all; the numbers above are of steps with "
        f"{train.global_batch_size} sequences of {train.seq_len} tokens, of which {train.steps:,} have as many tokens:"
    )
    return "\n".join([head, *lines])
