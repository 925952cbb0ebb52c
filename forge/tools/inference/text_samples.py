"""A hook that writes text samples of the model during training. Imported only if `evaluate.sample_interval` is set."""

from __future__ import annotations

import logging

import torch.distributed as dist

from forge.data.tokenizer import Tokenizer, begin_text
from forge.hook import Hook
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_every_rank
from forge.runtime.errors import UserError
from forge.tools.inference.sampling import Sampling, generate, recomputed
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class TextSamples(Hook):
    """Continue `evaluate.sample_prompt` every `evaluate.sample_interval` steps, and write the text to the metrics.

    Without a tokenizer, the hook does nothing. An empty prompt needs a tokenizer with a token for the beginning or the end
    of documents. Without such a token, the hook warns at the start and writes no samples.

    If all ranks have an error, the hook warns and the run continues. If only some ranks have an error, they wait for the
    other ranks until the watchdog ends all ranks. Without this wait, their next collective would be matched with another
    collective of the other ranks.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._prompt: list[int] | None = None
        tokenizer = trainer.data.tokenizer
        if tokenizer is not None:
            try:
                self._prompt = begin_text(tokenizer.encode(trainer.config.evaluate.sample_prompt), tokenizer)
            except UserError as error:
                message = "no samples: %s; set evaluate.sample_prompt"
                log.warning(message, error, extra=Cause.SIDE_SYSTEM.mark)

    def before_run(self, step: int) -> None:
        # A separate process group: a failed rank must not disturb the collectives of the model. Not in the constructor,
        # because ranks would wait for a rank whose hooks cannot be made.
        self._group = dist.new_group(backend="gloo")

    def after_step(self, step: int) -> None:
        trainer, tokenizer, prompt = self._trainer, self._trainer.data.tokenizer, self._prompt
        due = trainer.is_due(trainer.config.evaluate.sample_interval)
        if tokenizer is None or prompt is None or not due:
            return
        with trainer.reporter.phases.during("evaluation", step):
            try:
                text = on_every_rank(
                    "sampling", lambda: write_sample(trainer, tokenizer, prompt, step), self._group
                )
            except UserError as error:
                log.warning("no sample at step %d: %s", step, error, extra=Cause.SIDE_SYSTEM.mark)
            else:
                trainer.metrics.text(step, "sample", text)


def write_sample(trainer: Trainer, tokenizer: Tokenizer, prompt: list[int], step: int) -> str:
    """Generate a continuation of `prompt`, and return the text of both. prompt: at least one token id.

    Collective. All ranks draw the same tokens. The seed is run.seed + `step`.
    """
    config, model = trainer.last_config, trainer.model
    steps = generate(
        recomputed(lambda tokens: model.logits(tokens.to(trainer.device)), config.train.seq_len),
        [prompt],
        config.evaluate.sample_tokens,
        Sampling(config.evaluate.sample_temperature, seed=config.run.seed + step),
        stop=lambda row, new: new[-1] == tokenizer.eos_id,
    )
    new = [token for (token,) in steps if token is not None]
    return tokenizer.decode([*prompt, *new])
