"""Loss on held-out text and samples of what the model writes."""

from __future__ import annotations

import torch

from forge.config import Config
from forge.data.loader import evaluation_batches
from forge.data.sources import Source
from forge.data.tokenizer import Tokenizer
from forge.distributed import on_every_rank
from forge.errors import UserError
from forge.inference import Sampling, generate, recomputed
from forge.parallel.mesh import Meshes
from forge.parallel.model import ParallelModel


def evaluate(
    model: ParallelModel, sources: dict[str, Source], config: Config, meshes: Meshes, device: torch.device
) -> dict[str, float]:
    """Mean cross-entropy over all valid tokens of each source's first `evaluate.sequences` windows. Collective.

    Losses and tokens are summed over batches and ranks before the one division, so every token weighs the same on any
    layout. Raises UserError on every rank if any rank could not read its part.
    """
    losses = {}
    unreadable: list[Exception] = []
    for name, source in sources.items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in evaluation_batches(
            source,
            seq_len=config.train.seq_len,
            sequences=config.evaluate.sequences,
            micro_batch_size=config.train.micro_batch_size,
            rank=meshes.data_rank,
            ranks=meshes.data_ranks,
            device=device,
            document_mask=config.data.document_mask,
            unreadable=unreadable,
        ):
            sums = model.evaluate(batch)
            total += torch.stack([sums.cross_entropy, sums.tokens])
        cross_entropy, tokens = total.tolist()
        losses[name] = cross_entropy / max(tokens, 1.0)

    def raise_first() -> None:
        for error in unreadable:
            raise error

    on_every_rank("reading", raise_first)
    return losses


def write_sample(
    model: ParallelModel, tokenizer: Tokenizer, config: Config, device: torch.device, step: int
) -> str:
    """What the model writes after `evaluate.sample_prompt`. Collective: all ranks draw the same tokens."""
    prompt = tokenizer.encode(config.evaluate.sample_prompt)
    if tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id, *prompt]
    if not prompt:
        raise UserError("the tokenizer has no token that begins a text; set evaluate.sample_prompt")
    steps = generate(
        recomputed(lambda tokens: model.logits(tokens.to(device)), config.train.seq_len),
        [prompt],
        config.evaluate.sample_tokens,
        Sampling(config.evaluate.sample_temperature, seed=config.run.seed + step),
        stop=lambda row, new: new[-1] == tokenizer.eos_id,
    )
    new = [token for (token,) in steps if token is not None]
    return tokenizer.decode([*prompt, *new])
