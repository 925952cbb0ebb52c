"""From the command line to an exit code: load the config, join the ranks, train, and report the end of the run."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from forge.checkpoint import Checkpoints
from forge.config import (
    Config,
    Degrees,
    choose_layout,
    help_text,
    load_command,
    parse_command_line,
    to_toml,
)
from forge.data.build import open_data
from forge.hook import Hook, Hooks
from forge.observe.hardware import process_age_s
from forge.observe.log import setup_logging
from forge.observe.report import Reporter
from forge.observe.run_directory import RunDirectory
from forge.resilience.elastic import exit_code_after_stop
from forge.resilience.stopping import StopSignals
from forge.resilience.watchdog import Watchdog, bounds, collective_timeout_s
from forge.run.changes import check_data
from forge.run.crash import CrashReporter
from forge.run.history import History
from forge.run.hooks import load_hooks, make_hooks
from forge.run.mirrored import MirrorSaves, finish_mirror, restore_lost, wait_for_mirror
from forge.run.nodes import ranks_per_node, refuse_other_config, report_nodes
from forge.run.origin import Earlier, read_earlier, refuse_moved_run
from forge.run.out_of_memory import explaining_exhaustion
from forge.run.resume import Start
from forge.run.tiers import Tiers
from forge.runtime import compat
from forge.runtime.causes import Cause
from forge.runtime.distributed import cause_of, gather_from_ranks, on_every_rank, on_first_rank
from forge.runtime.errors import FAILED, FINISHED, STOPPED, UserError
from forge.runtime.fault import fault_point
from forge.runtime.files import replace_atomically
from forge.runtime.imports import load_function
from forge.runtime.terminal import print_result, stderr
from forge.runtime.tools import PLANNER
from forge.runtime.world import World, join, read_world
from forge.train.trainer import Trainer

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run train.py's command line `argv` (without the program name) and return the exit code."""
    with StopSignals() as signals:
        return _main(argv, signals)


def _main(argv: list[str], signals: StopSignals) -> int:
    try:
        world = read_world()
    except UserError as error:
        stderr.write(f"forge: {error}\n")
        return error.exit_code
    try:
        command = parse_command_line(argv)
        if command.action == "help":
            if world.rank == 0:
                print_result(help_text())
            return FINISHED
        config = load_command(command)
        if command.action == "print_config":
            if world.rank == 0:
                print_result(to_toml(config))
            return FINISHED
        if command.action == "plan":
            return load_function(PLANNER)(config, command) if world.rank == 0 else FINISHED
        refuse_moved_run(command, config)
        given = config
        config, degrees, fallback = choose_layout(command, given, world.size)
        join(world)
        refuse_other_config(given)
        degrees = degrees.on_nodes(config, ranks_per_node(world) if degrees.ep > 1 else 0)
        code = run(config, degrees, world, signals, fallback, given)
        dist.destroy_process_group()
        return code
    except UserError as error:
        if world.rank == 0:
            stderr.write(f"forge: {error}\n")
        else:
            # torchrun kills the other workers when the first worker ends, so rank 0 must have printed its message by
            # then. Before the rendezvous, ranks on a busy machine reach this line seconds apart.
            time.sleep(2 if dist.is_initialized() else 5)
        return error.exit_code
    except Exception as error:
        log.exception("rank %d failed", world.rank, extra=cause_of(error).mark)
        return FAILED


def run(
    config: Config,
    degrees: Degrees,
    world: World,
    signals: StopSignals,
    fallback: str = "",
    given: Config | None = None,
) -> int:
    """Train with `config` on the joined ranks and return this process's exit code. Collective.

    fallback: the entry of `parallel.fallbacks` that was applied; "": none. given: the configuration without the
    fallback; None: `config`. Raises UserError for errors that the user can fix. Errors in training and its set-up are
    also written to `status.json`.
    """
    hooks = on_every_rank("loading hooks", lambda: load_hooks(config))
    directory = RunDirectory(Path(config.run.output_dir) / config.run.name)
    holder = on_first_rank(
        "locking the run directory", lambda: directory.acquire(world.launch, world.restarted)
    )
    try:
        on_every_rank(
            "finding the run directory",
            lambda: directory.find(holder) if world.local_rank == 0 and world.rank > 0 else None,
        )
        return _run_in(directory, config, degrees, world, signals, hooks, fallback, given or config)
    finally:
        directory.release()


def _run_in(
    directory: RunDirectory,
    config: Config,
    degrees: Degrees,
    world: World,
    signals: StopSignals,
    hooks: list[tuple[str, type[Hook]]],
    fallback: str,
    given: Config,
) -> int:
    """Train in the locked run directory under the watchdog, and report the end of the run. Return the exit code.

    Collective. fallback, given: see `run`. An error is reported, then raised again.
    """
    setup_logging(world.rank, directory.logs, config.metrics.live)
    if world.size > 1:
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        log.info("%d ranks under %s, rendezvous at %s", world.size, world.launcher, at)
    compat.raise_timeouts(collective_timeout_s(config.resilience))
    reporter = Reporter(directory, world, time.monotonic() - process_age_s(), fallback)
    crash = CrashReporter(reporter)
    watchdog = Watchdog(
        bounds(config.resilience),
        directory.logs,
        world.rank,
        crash.watchdog_ends,
        alarm=crash.alarm,
        alarm_s=crash.alarm_s,
        data_waited=lambda: crash.alarm.data_waited if crash.alarm else -math.inf,
    )
    if world.launcher == "torchrun":
        # torchrun signals rank 0 as soon as another rank has exited or died, and rank 0 must still report the end of
        # that rank.
        signals.defer()
    signals.leaving = lambda reason: reporter.ended("stopped", reason, STOPPED)
    try:
        with watchdog, explaining_exhaustion(reporter.memory, config, degrees, crash.once):
            reporter.phases.listen(watchdog.enter)
            stopped = _train(config, degrees, reporter, signals, hooks, given)
            signals.defer()
            return _report_end(reporter, stopped, signals)
    except BaseException as error:
        signals.defer()
        crash.failed(error)
        raise


def _report_end(reporter: Reporter, stopped: str | None, signals: StopSignals) -> int:
    if stopped is None:
        reporter.ended("finished", "all steps done", FINISHED)
        return FINISHED
    final = any(gather_from_ranks("sharing why the run stops", lambda: signals.final))
    code = FINISHED if reporter.world.restarts_left > 0 else STOPPED
    reporter.ended("stopped", stopped, code, final=final)
    return exit_code_after_stop(lambda: signals.reason, reporter.world.restarts_left)


def _train(
    config: Config,
    degrees: Degrees,
    reporter: Reporter,
    signals: StopSignals,
    hooks: list[tuple[str, type[Hook]]],
    given: Config,
) -> str | None:
    """Find the checkpoint to start from, if any, build the model and train. Collective.

    given: the configuration to write to config.toml, without the fallback of this number of processes.

    Return None when all steps are done, else the reason for an early stop.
    """
    world, directory = reporter.world, reporter.directory
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # torchrun's agents count restarts separately, and the agent of a new node starts at 0.
    restarted = any(gather_from_ranks("sharing restarts", lambda: world.restarted))
    earlier = Earlier()
    if world.rank == 0:
        earlier = read_earlier(directory, reporter.before, restarted, world.launch)
    reporter.running()
    reporter.started(vars(degrees), config.parallel.data_parallel, earlier.restarted)
    report_nodes(reporter)
    fault_point("set-up", 0)

    kept, folder = config.checkpoint, directory.checkpoints
    checkpoints = Checkpoints(folder, keep_last=kept.keep_last, keep_every=kept.keep_every, mode=kept.mode)
    restore_lost(config, checkpoints, directory, earlier, reporter)
    tiers = Tiers(config, checkpoints, directory)
    start = tiers.find_start(earlier, reporter)
    point = start.point
    config, given = (one if point is None else point.continued(one) for one in (config, given))
    for fallback in checkpoints.fallbacks:
        reporter.event(Cause.FALLBACK, problem=fallback)
    data = open_data(config)
    if point is not None:
        inputs = point.state["inputs"]
        for change in check_data(point.path, inputs, data.fingerprints, config, point.shared):
            reporter.event(Cause.CHANGED_DATA, change=change)
        # A node-local state of the last step is still to be saved as a checkpoint, by `Saves`.
        if point.step >= config.train.steps and point.fetch is None:
            _report_done(config, start, point.step, reporter)
            tiers.follow(start)
            signals.defer()
            finish_mirror(config, checkpoints, point.step, reporter, lambda: signals.reason is not None)
            return None

    trainer = Trainer(config, degrees, data, reporter, signals)
    history = History(trainer, checkpoints)
    history.load(start)

    def all_hooks_with_state() -> list[Hook]:
        made = make_hooks(trainer, checkpoints, hooks, tiers, earlier.restarted)
        if point is not None:
            Hooks(made).load_state(point.state.get("hooks", {}))
        return made

    all_hooks = on_every_rank("making hooks", all_hooks_with_state)
    # Only now, because a refused start must change no file of the run.
    tiers.follow(start)
    compat.raise_timeouts(collective_timeout_s(config.resilience))  # for groups of hooks and `follow`
    history.begin(start)
    on_first_rank(
        "writing config.toml", lambda: replace_atomically(directory.config, to_toml(given).encode())
    )
    if point is not None:
        log.info("resumed from %s at step %d", point.path, point.step)
    step, path = (point.step, point.path) if point else (0, None)
    replaced_after = start.kept if start.replaces else None
    new = start.origin is not None
    reporter.begun(step, path, of=config.train.steps, new=new, replaced_after=replaced_after)
    signals.defer()
    stopped = trainer.train(all_hooks, history.roll_back)
    _wait_for_stores(config, all_hooks, stopped is None, reporter, signals)
    reporter.step = trainer.progress.step
    return stopped


def _wait_for_stores(
    config: Config, hooks: list[Hook], finished: bool, reporter: Reporter, signals: StopSignals
) -> None:
    """Wait for the hooks of the first rank, which copy to the mirror and to trackers. Collective."""
    if config.checkpoint.mirror and finished:
        mirrors = [hook.mirror for hook in hooks if isinstance(hook, MirrorSaves)]
        bound_s = config.resilience.save_timeout_s
        wait_for_mirror(mirrors, reporter, bound_s, lambda: signals.reason is not None)
    else:
        # The launcher would kill the first rank soon after the end of another rank.
        on_first_rank("ending the run", lambda: None)


def _report_done(config: Config, start: Start, step: int, reporter: Reporter) -> None:
    """Report a run that has made all steps. step: the checkpoint's.

    Raises UserError if the checkpoint is another history's, because nothing would be done.
    """
    done = f"step {step} of {config.train.steps}"
    key = "train.tokens" if config.train.tokens else "train.steps"
    if start.origin is not None:
        raise UserError(
            f"checkpoint.resume = {config.checkpoint.resume!r}: nothing is left to train, because the checkpoint is already "
            f"at {done}; raise {key}"
        )
    reporter.running(step)
    log.info("%s is finished: %s. Raise %s to continue.", config.run.name, done, key)
