"""Training in any layout: `Trainer.step` is the algorithm, `Trainer.train` the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.batch import Batch
from forge.config import Config, Degrees, Phases, StepPlan
from forge.config.phases import config_of, with_steps
from forge.data.build import RunData
from forge.data.loader import Loader
from forge.hook import Hook, Hooks, StepInfo
from forge.model import flops_per_token
from forge.observe.collector import Collector
from forge.observe.metrics import MetricsWriter
from forge.observe.report import Reporter
from forge.optim import Optimizer, build_optimizer, planned_rate, share_boxes
from forge.parallel.build import build_meta_model, build_parallel_model
from forge.parallel.float8 import product_format
from forge.parallel.mesh import make_meshes
from forge.parallel.step.gradients import GradientReport, report_gradients
from forge.parallel.step.model import Sums
from forge.resilience.elastic import is_elastic
from forge.resilience.stopping import StopSignals
from forge.resilience.watchdog import collective_timeout_s
from forge.runtime import compat
from forge.runtime.distributed import on_every_rank
from forge.runtime.errors import RollbackRequired
from forge.train.anomalies import AnomalyPolicy
from forge.train.model_summary import summarize
from forge.train.results import StepResults
from forge.train.state import Progress, SpikeWindow
from forge.train.step import apply_gradients, compute_gradients


class Trainer:
    """A model and its training state on all ranks.

    All methods except `request_stop`, `request_save` and `is_due` are collective.

    The constructor builds everything with initial weights and writes no file. `History` (forge/run/history.py) loads
    the start state, and opens the data at the step of this state.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        data: RunData,
        reporter: Reporter,
        signals: StopSignals,
    ):
        self.config, self.data = config, data
        self.reporter, self.signals, self.device = reporter, signals, reporter.world.device

        self.meshes = make_meshes(degrees, self.device.type, offloaded=config.parallel.cpu_offload)
        compat.raise_timeouts(collective_timeout_s(config.resilience))
        self.model = build_parallel_model(config, self.meshes, self.device)
        compat.raise_timeouts(collective_timeout_s(config.resilience))  # for groups created by the engines

        self.optimizer = self._make_optimizer()
        reporter.memory.count_state(self.model.memory(), self.optimizer.tensors())
        # Count the built model, because a user's class may differ from [model].
        whole = build_meta_model(config)
        summarize(self.model, whole, config, degrees, reporter.memory)

        spikes = SpikeWindow(config.resilience.spike_window, config.resilience.spike_threshold)
        self.phases = Phases(config)
        self.progress = Progress(data.dataset.order, spikes=spikes)
        self.anomalies = AnomalyPolicy(
            config.resilience, self.model, self.progress, self.device, self.compute_gradients, reporter.event
        )
        self.collector = Collector(config.train.gc_interval)
        flops = flops_per_token(whole, config.train.seq_len)
        products = product_format(config.precision, self.device.type)
        self.metrics = MetricsWriter(
            config, reporter.world, reporter.directory, flops, products, self.collector, reporter.running
        )
        self.results = StepResults(self.device, with_routers=self.metrics.wants_routers)
        self._wants_save = self._reported_save = False
        self._previous: StepPlan | None = None
        self.hooks = Hooks()

        self.batches: Loader

    def train(self, hooks: Sequence[Hook], roll_back: Callable[[RollbackRequired], None]) -> str | None:
        """Train until `train.steps`.

        Collective. Return None after the last step, otherwise the reason for an early stop. roll_back: returns this
        trainer to an earlier state, or raises UserError (exit 1) if it cannot.
        """
        self.hooks = Hooks(hooks)
        with self.hooks.around_run(self.progress.step):
            compat.raise_timeouts(collective_timeout_s(self.config.resilience))  # for groups created by hooks
            try:
                while not self.finished:
                    try:
                        self._prepare_change()
                        with self.hooks.around("step", self.progress.step + 1):
                            self.step()
                    except RollbackRequired as required:
                        roll_back(required)
                self.reporter.phases.enter("end")
            finally:
                self.batches.close()
        if self.progress.step >= self.config.train.steps:
            return None
        return self.signals.reason or "another rank was asked to stop"

    def _prepare_change(self) -> None:
        """Prepare a step that has other settings than the step before, e.g. because a phase begins. Collective."""
        plan, before, progress, step = self.plan, self._previous, self.progress, self.progress.step
        if before is not None and plan is not before:
            if plan.shapes != before.shapes:
                # A skipped step is computed again. This needs the model with the sizes and windows of that step.
                self.process_last_result()
            if plan.may_compile_after(before):
                # The watchdog's limit for the steps so far would be too short.
                self.reporter.phases.may_compile(step + 1)
        if step:
            # The last step of the history may belong to an earlier process, with other settings.
            last, began = self._last_plan, progress.last_step_at
            tokens = last.tokens if began is None else progress.tokens - began
            if plan.kind != (progress.last_kind or last.kind) or plan.tokens < tokens:
                # Loss and gradient norm may change their level. The last step's result belongs to the old level.
                self.process_last_result()
                progress.spikes.clear()
        self._previous = plan

    def step(self) -> None:
        """Make one optimizer step. Collective.

        The host waits until the device has finished the previous step. It does not wait for this step.
        """
        config, step, plan = self.config, self.progress.step + 1, self.plan
        lr = planned_rate(config, self.phases, step, self.progress.tokens)
        with self.hooks.around("data", step):
            batch = next(self.batches)
        self.progress.order = self.batches.order
        with self.hooks.around("gradients", step):
            sums, report = self.compute_gradients(batch)
            # The previous step's result is now known. Act on it before the next update.
            if self.process_last_result():
                sums, report = self.compute_gradients(batch)
        report = self.anomalies.examine(step, batch, sums, report)
        update, max_norm = self.hooks.around("optimizer", step), config.train.grad_clip_norm
        routers = apply_gradients(self.model, self.optimizer, report, lr, max_norm, update)
        # A request made after this step's gradient report remains, for the next report.
        self._wants_save = self._wants_save and not self._reported_save
        self.progress.advance(plan)
        self.results.push(
            StepInfo(step, self.progress.tokens, lr, self.progress.next_sample), sums, report, routers
        )

    def compute_gradients(self, batch: Batch) -> tuple[Sums, GradientReport]:
        """Compute the gradient of the global batch into the shards. Collective.

        Return the sums of losses and the gradient report.
        """
        sums = compute_gradients(self.model, batch)
        stop = self.signals.reason is not None
        self._reported_save = self._wants_save
        report = report_gradients(self.model.shards, sums.objective, stop=stop, save=self._wants_save)
        return sums, report

    def process_last_result(self) -> bool:
        """Wait for the last step's result and act on it, unless this has been done.

        Collective. Call before an evaluation or a save. Return True if the current gradients were discarded and must be
        recomputed. Raises RollbackRequired if a roll-back is needed.
        """
        result = self.results.pop()
        if result is None:
            return False
        self.hooks.call("after_result", result)
        return self.anomalies.process_result(result)

    def count_steps(self) -> None:
        """Compute `train.steps` from `train.tokens` for the present progress, which may have had other batch sizes."""
        self.config = with_steps(self.config, self.progress.step, self.progress.tokens)
        self.metrics.follow(self.config)

    @property
    def plan(self) -> StepPlan:
        """The sizes, mixture and settings of the next step (`StepPlan`)."""
        return self.phases.at(self.progress.tokens)

    @property
    def last_config(self) -> Config:
        """The config without phases, with the sizes, the window and the document mask of the last step."""
        return config_of(self.config, self._last_plan)

    @property
    def _last_plan(self) -> StepPlan:
        progress = self.progress
        return self.phases.ended_at(progress.step, progress.tokens, progress.last_step_at)

    @property
    def finished(self) -> bool:
        """Return whether the last step is done or a rank has requested a stop."""
        return self.progress.step >= self.config.train.steps or self.results.stop_requested

    def is_due(self, interval: int) -> bool:
        """Return whether periodic work is due: after every `interval` steps and after the last step. `interval` 0: never."""
        step = self.progress.step
        return interval > 0 and (step % interval == 0 or step == self.config.train.steps)

    def request_stop(self, reason: str, final: bool = True) -> None:
        """Ask all ranks to end the run. The all-reduce of the next gradient norm sends the request.

        final: job scripts do not start the run again.
        """
        self.signals.final |= final and self.signals.reason is None
        self.signals.reason = self.signals.reason or reason

    def request_save(self) -> None:
        """Ask all ranks for a checkpoint. The all-reduce of the next gradient norm sends the request."""
        self._wants_save = True

    def renew_optimizer(self) -> None:
        """Replace the optimizer with a new one, which starts from the current weights."""
        del self.optimizer  # frees the old moments before the new ones are allocated
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> Optimizer:
        """Build the optimizer of this rank's shards. Collective.

        Raises UserError on every rank if the optimizer cannot update a parameter or memory is exhausted on a rank.
        """
        config, group = self.config, self.meshes.stage
        compiled = config.compile if config.compile.optimizer else None
        # forge's constructors then have no collectives, so a rank that fails in one leaves no other rank waiting.
        shards = share_boxes(self.model.shards, config.optimizer, group)
        return on_every_rank(
            "making the optimizer",
            lambda: build_optimizer(shards, config.optimizer, group, compiled, self.model.copies),
        )

    def open_data(self) -> None:
        """Open this data rank's batches at `progress`. The config's mixture applies from this position."""
        dataset, progress = self.data.dataset, self.progress
        self.batches = Loader(
            dataset.following(progress.order),
            global_batch_size=self.config.train.global_batch_size,
            rank=self.meshes.data_rank,
            ranks=self.meshes.data_ranks,
            start_sample=progress.next_sample,
            device=self.device,
            prefetch=self.config.data.prefetch,
            plan_at=self.phases.at,
            tokens=progress.tokens,
            # The agents of an elastic run give the ranks more time, e.g. because a node joins.
            is_stopping=lambda: self.signals.reason is not None and not is_elastic(),
        )
