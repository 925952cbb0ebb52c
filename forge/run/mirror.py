"""Copies of a run's checkpoints in a store (`checkpoint.mirror`): made after each save, and resumed from."""

from __future__ import annotations

from forge.checkpoint import Checkpoints, folders
from forge.checkpoint.mirror import Mirror, copied_steps, restore
from forge.config import Config
from forge.hook import Hook
from forge.observe.run_directory import RunDirectory
from forge.run.origin import Earlier, new_history_because
from forge.run.save import Saves
from forge.runtime.distributed import on_first_rank
from forge.runtime.errors import UserError
from forge.runtime.remote import filesystem_of, is_url, join
from forge.train.trainer import Trainer


def mirror_url(config: Config) -> str:
    """Return where this run's checkpoints are copied to. UserError where that is no URL."""
    if not is_url(config.checkpoint.mirror):
        raise UserError(
            f'checkpoint.mirror = "{config.checkpoint.mirror}": is not a URL; allowed: s3://..., gs://..., file:///... and '
            "all that fsspec can write to, or empty for none"
        )
    return join(config.checkpoint.mirror, config.run.name)


def restore_lost(config: Config, checkpoints: Checkpoints, directory: RunDirectory, earlier: Earlier) -> None:
    """Restore the newest copy where the run directory has lost all checkpoints of the history that `config` continues.

    Collective. Raises UserError: as `restore`, or exit 2 where a new history would overwrite the copies of another.
    """
    kept, folder = config.checkpoint, checkpoints.folder
    if not kept.mirror:
        return

    def bring() -> None:
        url = mirror_url(config)
        filesystem_of(url)  # refuses a URL now, not at the first save
        new_because = new_history_because(config, directory, earlier.finished)
        # A damaged checkpoint, or one set aside, shows that the folder is not lost: `find_start` decides about those.
        if new_because is None and folders.is_empty(folder):
            restore(url, folder)
        elif new_because is not None and (copies := copied_steps(url)):
            raise UserError(
                f"checkpoint.mirror = {url}: has the checkpoints {copies} of another history, which a new one would "
                f"overwrite ({new_because}). Use another run.name or another checkpoint.mirror, or continue that history "
                'with checkpoint.resume = "auto"'
            )

    on_first_rank("restoring the mirror", bring)


class MirrorSaves(Hook):
    """On the first rank: has each checkpoint of `saves` copied when it is complete."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, saves: Saves):
        config = trainer.config.checkpoint
        self._trainer = trainer
        self._mirror = Mirror(
            mirror_url(trainer.config), checkpoints.folder, config.keep_last, config.keep_every
        )
        saves.when_complete = self._mirror.copy

    def before_run(self, step: int) -> None:
        self._mirror.forget_after(step)

    def after_rollback(self, step: int) -> None:
        self._mirror.forget_after(step)

    def after_run(self) -> None:
        self._mirror.close(wait=self._trainer.finished)
