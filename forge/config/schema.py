"""The whole configuration: one typed section per concern. [model], [data] and the parallel layout have their own files."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, Field, Strict, StringConstraints

from forge.config.data import Data
from forge.config.layout import ActivationCheckpoint, Compile, Parallel, Pipeline, Precision
from forge.config.model import ModelConfig
from forge.config.optimizer import GroupConfig, MuonConfig, MupConfig
from forge.config.phase import Beta, Epsilon, Phase
from forge.config.section import (
    NO_EXPERTS,
    Count,
    ImportPath,
    ListOf,
    NonNegativeNumber,
    Phrase,
    Positive,
    PositiveNumber,
    Section,
    Share,
    Text,
    Unused,
    unused_if,
    used_if,
)

FileName = Annotated[
    str,
    StringConstraints(pattern=r"^[^/\x00-\x1f]*[^/.\x00-\x1f][^/\x00-\x1f]*\z"),
    Phrase("a file name without /"),
]
S = TypeVar("S", bound=Section)
Monitor = Literal["activations", "gradients", "weights", "updates", "attention", "experts"]
MONITORS: tuple[Monitor, ...] = ("activations", "gradients", "weights", "updates", "attention", "experts")
# When a key has no effect.
SAMPLES, TASKS = unused_if("evaluate.sample_interval", 0), unused_if("evaluate.tasks", ())
LOCAL, STRAGGLERS = unused_if("checkpoint.local_interval", 0), unused_if("resilience.straggler_interval", 0)
PROFILES, WSD = unused_if("profile.span", ()), used_if("schedule.name", "wsd")
PHASES = Unused("there is no [[phase]]", lambda c: not c.phase)
BY_TIME = Unused("checkpoint.interval is set", lambda c: c.checkpoint.interval is not None)
VALIDATION = Unused("data.validation is empty", lambda c: c.evaluate.interval and not c.data.validation)
TOKENIZER = Unused("there is no tokenizer", lambda c: c.data.tokenizer == "none" or c.data.synthetic)


def _first_and_last(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise ValueError("give the first and the last step, such as [10, 12], or [] for none")
    return steps


StepRange = Annotated[ListOf[Positive], AfterValidator(_first_and_last)]


class Run(Section):
    """The name of the run and the folder of its files."""

    name: FileName = Field(
        default="run", json_schema_extra={"default": "the config's file name without .toml"}
    )
    """Name of the run. Its files are in output_dir/name."""
    output_dir: Text = "runs"
    """Folder that holds all runs."""
    seed: Count = 0
    """Random seed of the initial weights and of the order of the data."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a repeated run on the same hardware is bit-identical. Slower."""


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "lion", "muon"] | ImportPath = "adamw"
    """Update rule, or your own class, which has its own table of keys; see docs/internals/extending/optimizer.md."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeNumber = 0.1
    """Decoupled weight decay: each step multiplies weights by 1 - lr * weight_decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the first and second moment; lion: of the mean that gives the direction, and of the momentum."""
    eps: Annotated[Epsilon, unused_if("optimizer.name", "lion")] = 1e-8
    """Added to the square root of the second moment."""
    no_decay: Annotated[ListOf[Text], unused_if("optimizer.weight_decay", 0)] = (
        "*norm.weight",
        "*bias",
        "embedding.weight",
        "*.conv.*",
        "*.decay.*",
        "*.sinks.weight",
        "*mix.query",
    )
    """Glob patterns of parameter names without weight decay."""
    groups: ListOf[GroupConfig] = ()
    """Parameters with a learning rate or weight decay of their own, by glob patterns of their names: a list of tables with
    the keys names, lr_scale and weight_decay. See docs/reference/optimizers.md."""
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of both moments. With float32, precision.storage if that is wider. bfloat16 and int8 are rounded
    stochastically, with the same noise on any layout. int8, for adamw, has a scale for every 64 elements."""
    ema: Beta = 0.0
    """Decay rate of a mean of the weights over steps, kept beside them; scripts/average.py --ema makes weights of it. 0: no
    mean."""
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    """Dependence of initial weights and learning rates on the sizes of the model. mup: on its width, so that the best
    learning rate does not change; completep: also on its depth. See docs/guides/learning-rates.md."""
    muon: MuonConfig = MuonConfig()
    mup: MupConfig = MupConfig()

    def table(self, keys: type[S]) -> S:
        """Return the table within [optimizer] whose class is `keys`, e.g. MuonConfig."""
        return next(value for _, value in self if isinstance(value, keys))


class ScheduleConfig(Section):
    """The learning rate schedule: warmup, plateau, decay."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """wsd decays only at the end, cosine and linear decay after the warmup, constant does not decay."""
    warmup_steps: Count | None = Field(
        default=None, json_schema_extra={"default": "1% of train.steps, at most 2000"}
    )
    """Steps of linear warmup to the peak. A shorter run ends during the warmup."""
    decay_fraction: Annotated[Share, WSD] = 0.2
    """wsd: length of the final decay, as a fraction of train.steps."""
    decay_shape: Annotated[Literal["linear", "cosine", "sqrt"], WSD] = "linear"
    """wsd: shape of the final decay."""
    min_lr_ratio: Annotated[Share, unused_if("schedule.name", "constant")] = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    unit: Annotated[Literal["steps", "tokens"], PHASES] = "steps"
    """Unit of warmup, plateau and decay; it matters if phases change the size of steps. With tokens,
    warmup_steps are steps of the size in [train]."""
    lr_rule: Annotated[Literal["none", "sqrt", "linear"], PHASES] = "none"
    """How the learning rate follows a batch that phases change: times (batch / train.global_batch_size) to the power of 0,
    1/2 or 1."""


class Train(Section):
    """The batch size, the sequence length and the number of steps."""

    steps: Annotated[int, Ge(1), Le(10**9)]
    """Total number of optimizer steps, including those before a resume."""
    seq_len: Annotated[int, Ge(1), Le(10**9)]
    """Tokens per sequence."""
    global_batch_size: Annotated[int, Ge(1), Le(10**7)]
    """Sequences per optimizer step: micro_batch_size * data-parallel ranks * gradient accumulation, which follows."""
    micro_batch_size: Positive = 1
    """Sequences per rank and forward pass."""
    tokens: Annotated[int, Ge(0), Le(10**16)] = 0
    """Total number of tokens, in place of `steps`, which follow from it and from the phases. 0: use `steps`. On the
    command line, each of the two replaces the other one in the file."""
    grad_clip_norm: NonNegativeNumber = 1.0
    """Maximum global gradient norm: larger gradients are scaled down to it. 0: off."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the z-loss: the mean squared logsumexp of the output logits, which keeps them from drifting."""
    loss_chunk_tokens: Positive = 1024
    """Number of tokens whose logits are computed at once. Fewer need less memory."""
    gc_interval: Count = 100
    """Steps between Python garbage collections, which all ranks run at the same time. 0: Python decides."""
    hooks: ListOf[ImportPath] = ()
    """Import paths of your own hooks: subclasses of forge.hook.Hook, called before and after each phase of a step. See
    docs/internals/extending/hook.md."""


class Checkpoint(Section):
    """The saves of a run, and its initial state."""

    interval: Count | None = Field(default=None, json_schema_extra={"default": "by interval_minutes"})
    """Steps between checkpoints. 0: save only at the end, and when the run is asked to stop."""
    interval_minutes: Annotated[NonNegativeNumber, BY_TIME] = 30.0
    """Minutes between checkpoints if `interval` is not set. 0: the same as interval = 0."""
    keep_last: Count = 3
    """Number of newest checkpoints to keep. 0: all."""
    keep_every: Count = 0
    """Never remove checkpoints at multiples of this step. 0: off."""
    mode: Literal["async", "sync"] = "async"
    """async: write in the background while training continues; sync: wait."""
    mirror: str = ""
    """Complete checkpoints are copied in the background to this URL, as run.name/step-n. If the local folder is gone,
    resume = "auto" continues from there. Empty: none."""
    local_interval: Count = 0
    """Steps between states that the nodes keep themselves, which a restart prefers to older checkpoints. 0: none."""
    local_dir: Annotated[str, LOCAL] = ""
    """Folder on each node for these states; the last two are kept. It is private to the user (mode 0700): new,
    empty, or made by forge. Empty: /dev/shm/forge-UID, in memory."""
    peers: Annotated[Count, LOCAL] = 1
    """Number of other nodes that keep a copy of a node's part of such a state."""
    resume: Text = "auto"
    """`auto`: resume from the newest valid checkpoint of this run, if any; `none`: start a new history. Or a checkpoint
    to resume from. `none` and a checkpoint apply once: repeating the command continues the history they began."""
    init: str = ""
    """A checkpoint or imported folder to take the initial weights from, in a new training history. Empty: random weights."""
    init_changes: Annotated[ListOf[Text], unused_if("checkpoint.init", "")] = ()
    """Keys of [model] that may differ from the training of `init`'s weights, e.g. ["model.norm_eps"]. A longer context
    (rope_theta, rope_scaling, sliding_window, layer_pattern) needs no entry; other differences are refused."""
    verify: bool = True
    """Verify all checksums before loading. false: skip those of the tensor files."""
    max_failed_saves: Count = 5
    """End the run after this many failed saves in a row. 0: never."""
    allow_changed_data: bool = False
    """Allow a resume with other sources or weights than the checkpoint's. Each source continues at its position."""


class Evaluate(Section):
    """Held-out loss and text samples while training."""

    interval: Annotated[Count, VALIDATION] = 1000
    """Steps between evaluations on data.validation, if any, with another after the last step. 0: never."""
    sequences: Annotated[Positive, unused_if("evaluate.interval", 0), VALIDATION] = 64
    """Sequences per held-out source, from all over it and the same in every evaluation."""
    tasks: ListOf[Text] = ()
    """Names of lm-eval's tasks, or of your own, that the model is scored on; needs the extra forge[eval] and a tokenizer."""
    tasks_interval: Annotated[Count, TASKS] = 1000
    """Steps between scores on the tasks, with another after the last step. 0: never."""
    tasks_path: Annotated[str, TASKS] = ""
    """A folder with tasks of your own, as lm-eval's --include_path. Empty: none."""
    tasks_limit: Annotated[Count, TASKS] = 0
    """Number of questions to score in each task, from its first one on. 0: all."""
    sample_interval: Annotated[Count, TOKENIZER] = 0
    """Steps between generated text samples, with another after the last step. 0: never."""
    sample_prompt: Annotated[str, SAMPLES] = ""
    """Prompt of the samples. Empty: they begin as a document does, which needs a tokenizer with a begin or end token."""
    sample_tokens: Annotated[Positive, SAMPLES] = 64
    """Tokens per sample."""
    sample_temperature: Annotated[NonNegativeNumber, SAMPLES] = 0.8
    """Sampling temperature. Below 1 favours likely tokens; 0 always takes the likeliest."""


class Metrics(Section):
    """The metrics and reports of a run."""

    log_interval: Positive = 10
    """Steps between lines in the log and in metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    expert_map_interval: Annotated[Count, NO_EXPERTS] = 1000
    """Mixture of experts: steps between images of the load per layer and expert in TensorBoard, with their counts in
    metrics.jsonl. 0: never."""
    monitor_interval: Count = 0
    """Steps between reports from inside the model: see docs/guides/monitors.md. 0: never."""
    monitors: Annotated[ListOf[Monitor], MinLen(1), unused_if("metrics.monitor_interval", 0)] = MONITORS
    """Monitored quantities, for each layer or matrix: activations (with dead and saturated units), gradients, weights,
    updates, attention (logits and entropy), experts (entropy of scores and load)."""
    sources: bool = False
    """Report the loss of each of data.sources, and by position in the sequence, on each line."""
    wandb: str = ""
    """Project at Weights & Biases that gets the curves; needs the package wandb. Empty: none."""
    mlflow: str = ""
    """Experiment at MLflow that gets the curves; needs the package mlflow. Empty: none."""
    live: bool = False
    """On a terminal, show a view that is redrawn instead of a line for each step; elsewhere lines, as without it."""
    peak_tflops: NonNegativeNumber = 0.0
    """Peak of one device in TFLOP/s, for MFU. 0: look it up by the GPU's name; without an entry, MFU is not reported."""

    @property
    def trackers(self) -> dict[str, str]:
        """Return name of the tracker -> its project or experiment; empty if it is off."""
        return {"wandb": self.wandb, "mlflow": self.mlflow}


class Profile(Section):
    """Traces of selected steps, to find the time and memory of each operation."""

    span: StepRange = ()
    """First and last step to profile, such as [10, 12]. []: none."""
    ranks: Annotated[ListOf[Count], PROFILES] = (0,)
    """Ranks that write a trace. Tracing many steps or ranks is slow and takes much space."""
    memory_snapshot: Annotated[bool, PROFILES] = False
    """Also record every CUDA memory allocation in these steps."""


class Resilience(Section):
    """Timeouts, skipped steps, rollbacks and checks for faults."""

    setup_timeout_s: NonNegativeNumber = 3600.0
    """Limit in seconds from the start to the first step, including the loading of a checkpoint. After it, the watchdog
    writes the stacks of every rank and ends the run with exit code 76. 0: off."""
    first_step_timeout_s: NonNegativeNumber = 3600.0
    """The same limit for the first step, which compiles. 0: off."""
    step_timeout_s: NonNegativeNumber = 1800.0
    """The same limit for every other step, including the wait for data. After some steps a step may take 20 times their
    median, or five minutes if that is longer, and never longer than this. 0: off."""
    evaluate_timeout_s: NonNegativeNumber = 3600.0
    """The same limit for an evaluation and its samples. 0: off."""
    save_timeout_s: NonNegativeNumber = 3600.0
    """The same limit for the part of a save that blocks training, including a wait for the save before it. 0: off."""
    time_limit_s: NonNegativeNumber = 0.0
    """Limit of the run in seconds: it saves and stops with exit code 75 before then, early enough for its slowest save so
    far. 0: off."""
    max_skipped_steps: Positive = 10
    """Roll back after this many skipped steps in a row."""
    max_rollbacks: Count = 2
    """Maximum number of rollbacks without a new checkpoint in between; after these the run fails with a report. A rollback
    returns to the last good checkpoint and skips the data of the steps since."""
    rerun_skipped_steps: bool = True
    """Recompute the gradient of a skipped step, to find out whether the fault is transient or caused by data or parameters,
    and to name tensors and ranks. Other steps are not slowed."""
    spikes: Literal["report", "skip", "rollback"] = "report"
    """Reaction to a loss or gradient norm far above the usual. report: write an event; skip: also skip the step, as if it
    were not finite; rollback: roll back at once."""
    spike_threshold: PositiveNumber = 10.0
    """Distance of a spike above the median, in standard deviations, which are estimated robustly from the window."""
    spike_window: Positive = 128
    """Number of previous steps that define the usual loss and gradient norm. No spike is reported before half of them."""
    check_replicas: bool = True
    """Before each save, compare digests of the tensors that several ranks hold copies of. If they differ, nothing is saved
    and the run rolls back, without skipping data."""
    straggler_interval: Count = 100
    """Steps between comparisons of the speed of all ranks. 0: never."""
    straggler_factor: Annotated[float, Gt(1), STRAGGLERS] = 1.3
    """Report a rank that makes steps longer by this factor and by at least 10 ms."""
    drain_stragglers: Annotated[Count, STRAGGLERS] = 0
    """In an elastic run: after N consecutive reports for a rank, its node leaves the run, if enough others remain.
    0: never."""


class Config(Section):
    """The configuration of a run."""

    run: Run = Run()
    model: ModelConfig
    data: Data
    train: Train
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    precision: Precision = Precision()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    metrics: Metrics = Metrics()
    profile: Profile = Profile()
    resilience: Resilience = Resilience()
    phase: ListOf[Phase] = ()
