"""Forward passes without gradients: the loss on held-out text, and the logits for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.config import Config
from forge.data.build import build_validation
from forge.data.held_out import evaluation_batches
from forge.parallel.mesh import Meshes
from forge.parallel.step.model import ParallelModel
from forge.tools.verify.pieces import TensorKey, TensorPiece, whole
from forge.train.evaluate import held_out_losses

# Number of texts, tokens per prompt, and generated tokens. Odd sizes, so that no layout divides texts or prompts evenly.
TEXTS, PROMPT, NEW = 3, 13, 2


def held_out_on_rank(
    model: ParallelModel, config: Config, meshes: Meshes, device: torch.device
) -> dict[TensorKey, list[TensorPiece]]:
    """Evaluate and generate as in a run. Collective.

    Return the loss of each held-out source (kind `held-out`) and the logits of the generated texts (kind `generation`).
    """
    sources = build_validation(config)
    losses = held_out_losses(model, sources, config, meshes, device)
    found = {("held-out", name): torch.tensor(loss, dtype=torch.float64) for name, loss in losses.items()}
    found["generation", "logits"] = _generate(model.logits, config, device)
    return {key: [whole(values.cpu())] for key, values in found.items()}


@torch.no_grad()
def held_out_of(model: Any, config: Config, device: torch.device) -> dict[TensorKey, Tensor]:
    """Return the tensors of `held_out_on_rank` for a plain model in one process, with one forward per source."""
    found = {}
    for name, source in build_validation(config).items():
        sequences = config.evaluate.sequences
        (batch,) = evaluation_batches(
            source,
            seq_len=config.train.seq_len,
            sequences=sequences,
            micro_batch_size=sequences,
            rank=0,
            ranks=1,
            device=device,
            document_mask=config.data.document_mask,
        )
        losses = model(batch.tokens, batch.labels, batch.positions, batch.documents)
        found["held-out", name] = losses[1].double() / (batch.labels >= 0).sum()
    found["generation", "logits"] = _generate(model, config, device)
    return found


@torch.no_grad()
def _generate(logits: Any, config: Config, device: torch.device) -> Tensor:
    """Generate greedily from fixed prompts. Return the logits of all tokens, `[texts, seq, vocab]`.

    logits: a function of tokens, int64 `[texts, seq]`. Collective if `logits` is.
    """
    count = torch.arange(TEXTS * PROMPT, device=device)
    tokens = (count * 7919 % config.model.vocab_size).view(TEXTS, PROMPT)
    for _ in range(NEW):
        tokens = torch.cat([tokens, logits(tokens)[:, -1:].argmax(-1)], dim=1)
    return logits(tokens)
