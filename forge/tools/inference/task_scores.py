"""A hook that scores the model on lm-eval's tasks during training. Imported only if `evaluate.tasks` is not empty."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch.distributed as dist

from forge.data.tokenizer import Tokenizer
from forge.hook import Hook
from forge.runtime.causes import Cause
from forge.runtime.distributed import on_every_rank
from forge.runtime.errors import UserError
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


class TaskScores(Hook):
    """Score the model on `evaluate.tasks` every `evaluate.tasks_interval` steps, if the data has a tokenizer.

    All ranks process the same questions, so any layout works, but data-parallel ranks repeat the work. If a rank cannot
    load the tasks for the first time, or if all ranks have an error in scoring, the hook warns and the run continues. If
    only some ranks have an error later, they wait for the other ranks until the watchdog ends all ranks. The constructor
    raises UserError for an unknown task or for a tokenizer without begin and end tokens.
    """

    def __init__(self, trainer: Trainer):
        from forge.tools.inference import tasks  # needs lm-eval

        config, self._trainer, self._tasks = trainer.config, trainer, tasks
        folder = config.evaluate.tasks_path or None
        self._manager = tasks.find_tasks(
            config.evaluate.tasks, folder, "evaluate.tasks =", "evaluate.tasks_path"
        )
        self._loaded = False
        if trainer.data.tokenizer is None:
            message = "evaluate.tasks: skipped, because the data has no tokenizer"
            log.warning(message, extra=Cause.SIDE_SYSTEM.mark)
        else:
            self._scorer(
                trainer.data.tokenizer
            )  # raises UserError for a tokenizer without a begin or end token

    def before_run(self, step: int) -> None:
        # A separate process group: a failed rank must not disturb the collectives of the model. Not in the constructor,
        # because ranks would wait for a rank whose hooks cannot be made.
        self._group = dist.new_group(backend="gloo")

    def after_step(self, step: int) -> None:
        trainer, config = self._trainer, self._trainer.config.evaluate
        tokenizer = trainer.data.tokenizer
        if tokenizer is None or not trainer.is_due(config.tasks_interval):
            return
        trainer.process_last_result()
        with trainer.reporter.phases.during("evaluation", step):
            scorer, limit = self._scorer(tokenizer), config.tasks_limit or None
            try:
                # A rank may fail to download a dataset, which others have in their caches.
                if not self._loaded:
                    load = functools.partial(self._tasks.load_tasks, config.tasks, self._manager)
                    on_every_rank("loading tasks", load, self._group)
                    self._loaded = True
                scores = on_every_rank(
                    "scoring tasks",
                    lambda: self._tasks.evaluate_tasks(scorer, config.tasks, self._manager, limit=limit),
                    self._group,
                )
            except UserError as error:
                log.warning("no task was scored at step %d: %s", step, error, extra=Cause.SIDE_SYSTEM.mark)
            else:
                trainer.metrics.tasks(step, scores)

    def _scorer(self, tokenizer: Tokenizer) -> Any:
        trainer, train = self._trainer, self._trainer.last_config.train
        return self._tasks.LoopScorer(
            trainer.model.logits, tokenizer, train.seq_len, trainer.device, train.micro_batch_size
        )
