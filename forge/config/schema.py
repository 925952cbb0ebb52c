"""The whole configuration: one typed section per concern. [model], [data] and the layout sections have their own files."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, Field, Strict, StringConstraints

from forge.config.data import Data, is_synthetic
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
# Conditions under which keys have no effect.
SAMPLES, TASKS = unused_if("evaluate.sample_interval", 0), unused_if("evaluate.tasks", ())
LOCAL, STRAGGLERS = unused_if("checkpoint.local_interval", 0), unused_if("resilience.straggler_interval", 0)
PROFILES, WSD = unused_if("profile.span", ()), used_if("schedule.name", "wsd")
PHASES = Unused("there is no [[phase]]", lambda c: not c.phase)
BY_TIME = Unused("checkpoint.interval is set", lambda c: c.checkpoint.interval is not None)
VALIDATION = Unused("data.validation is empty", lambda c: c.evaluate.interval and not c.data.validation)
TOKENIZER = Unused("there is no tokenizer", lambda c: c.data.tokenizer == "none" or is_synthetic(c))


def _first_and_last(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise ValueError("give two numbers, the first and the last step, e.g. [10, 12], or [] for none")
    return steps


StepRange = Annotated[ListOf[Positive], AfterValidator(_first_and_last)]


class Run(Section):
    """The name of the run and the folder of its files."""

    name: FileName = Field(
        default="run", json_schema_extra={"default": "the config's file name without .toml"}
    )
    """Name of the run. The run directory is output_dir/name."""
    output_dir: Text = "runs"
    """Parent folder of all run directories."""
    seed: Count = 0
    """Random seed for the initial weights and the data order."""
    deterministic: bool = False
    """Use only deterministic kernels: a repeated run on the same hardware is bit-identical. Slower."""


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "lion", "muon"] | ImportPath = "adamw"
    """Optimizer, or the import path of your own optimizer class, which may have its own table of keys; see
    docs/internals/extending/optimizer.md."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeNumber = 0.1
    """Decoupled weight decay: each step multiplies weights by 1 - lr * weight_decay."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the first and second moment. lion: decay rates for the update's direction and for the momentum."""
    eps: Epsilon = 1e-8
    """Added to the square root of the second moment. lion: the update of an element c of the averaged gradient is c / eps
    if abs(c) < eps, and the sign of c otherwise."""
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
    """Parameters with a separate learning rate or weight decay: a list of tables with the keys names (glob patterns),
    lr_scale and weight_decay. See docs/reference/optimizers.md."""
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of both moments. float32 becomes precision.storage, if that is wider. bfloat16 and int8 are rounded
    stochastically, with the same noise for any layout. int8 is only for adamw and has a scale for every 64 elements."""
    ema: Beta = 0.0
    """Decay rate of an exponential mean of the weights, kept in addition to the weights. scripts/average.py --ema
    exports it as weights. 0: no mean."""
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    """How initial weights and learning rates depend on the model's size. mup: on the width, so the best learning rate
    is the same at any width. completep: also on the depth. See docs/guides/learning-rates.md."""
    muon: MuonConfig = MuonConfig()
    mup: MupConfig = MupConfig()

    def table(self, keys: type[S]) -> S:
        """Return the table of class `keys` within [optimizer]. keys: e.g. MuonConfig."""
        return next(value for _, value in self if isinstance(value, keys))


class ScheduleConfig(Section):
    """The learning rate schedule: warmup, plateau, decay."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """wsd: constant, with a decay at the end. cosine, linear: decay from the end of the warmup. constant: no decay."""
    warmup_steps: Count | None = Field(
        default=None, json_schema_extra={"default": "1% of train.steps, at most 2000"}
    )
    """Steps of linear warmup to the peak. A run shorter than the warmup ends during the warmup."""
    decay_fraction: Annotated[Share, WSD] = 0.2
    """wsd: length of the final decay as a fraction of train.steps."""
    decay_shape: Annotated[Literal["linear", "cosine", "sqrt"], WSD] = "linear"
    """wsd: shape of the final decay."""
    min_lr_ratio: Annotated[Share, unused_if("schedule.name", "constant")] = 0.1
    """Learning rate of the last step as a fraction of the peak."""
    unit: Annotated[Literal["steps", "tokens"], PHASES] = "steps"
    """Unit of warmup, plateau and decay, if phases change the step size. tokens: warmup_steps counts steps of the size
    in [train]."""
    lr_rule: Annotated[Literal["none", "sqrt", "linear"], PHASES] = "none"
    """Factor on the learning rate if phases change the batch size, with r = batch size / train.global_batch_size. none: no
    factor. sqrt: the square root of r. linear: r."""


class Train(Section):
    """The batch size, the sequence length and the number of steps."""

    steps: Annotated[int, Ge(1), Le(10**9)]
    """Total number of optimizer steps of the run, including steps before a resume."""
    seq_len: Annotated[int, Ge(1), Le(10**9)]
    """Tokens per sequence."""
    global_batch_size: Annotated[int, Ge(1), Le(10**7)]
    """Sequences per optimizer step. The number of gradient accumulation steps is global_batch_size / (micro_batch_size
    * data-parallel ranks)."""
    micro_batch_size: Positive = 1
    """Sequences per rank and forward pass."""
    tokens: Annotated[int, Ge(0), Le(10**16)] = 0
    """Total number of tokens. `steps` is then computed from tokens and phases. 0: use `steps`. On the command line,
    `tokens` replaces the file's `steps` and vice versa."""
    grad_clip_norm: NonNegativeNumber = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to this norm. 0: off."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the z-loss, the mean squared logsumexp of the output logits. The z-loss keeps logits from drifting."""
    loss_chunk_tokens: Positive = 1024
    """Number of tokens whose logits are computed at once. A smaller number needs less memory."""
    gc_interval: Count = 100
    """Steps between Python garbage collections, at the same step on all ranks. 0: Python decides."""
    hooks: ListOf[ImportPath] = ()
    """Import paths of your own hooks: subclasses of forge.hook.Hook, called at fixed points of every step. See
    docs/internals/extending/hook.md."""


class Checkpoint(Section):
    """Checkpoints of the run, and its initial state."""

    interval: Count | None = Field(default=None, json_schema_extra={"default": "by interval_minutes"})
    """Steps between checkpoints. 0: save only at the end of the run and at a requested stop."""
    interval_minutes: Annotated[NonNegativeNumber, BY_TIME] = 30.0
    """Minutes between checkpoints if `interval` is not set. 0: as with interval = 0."""
    keep_last: Count = 3
    """Number of newest checkpoints to keep. 0: keep all."""
    keep_every: Count = 0
    """Never remove the first checkpoint at or after each multiple of this number of steps. 0: off."""
    mode: Literal["async", "sync"] = "async"
    """async: write in the background while training continues; sync: wait."""
    mirror: str = ""
    """URL to which complete checkpoints are copied in the background, as run.name/step-n. If the local folder is lost,
    resume = "auto" continues from the mirror. Empty: no mirror."""
    local_interval: Count = 0
    """Steps between local states: checkpoints kept on the nodes themselves. A restart uses a local state if it is newer
    than every checkpoint. 0: no local states."""
    local_dir: Annotated[str, LOCAL] = ""
    """Folder on each node for local states; the last two are kept. The folder is private to the user (mode 0700) and
    must be new, empty, or made by forge. Empty: /dev/shm/forge-UID, in memory."""
    peers: Annotated[Count, LOCAL] = 1
    """Number of other nodes that store a copy of a node's part of a local state."""
    resume: Text = "auto"
    """`auto`: resume from the newest valid checkpoint of this run, if any. `none`: start over at step 0. Any other
    value: the checkpoint to resume from. `none` and a checkpoint apply only to the first start: if the command is
    repeated, the run resumes from its own newest checkpoint."""
    init: str = ""
    """Checkpoint or imported folder with the initial weights of a new run, which begins at step 0. Empty: random weights."""
    init_changes: Annotated[ListOf[Text], unused_if("checkpoint.init", "")] = ()
    """Keys of [model] whose values may differ from those in the checkpoint `init`, e.g. ["model.norm_eps"]. Keys of
    a longer context (rope_theta, rope_scaling, sliding_window, sliding_rope_theta, layer_pattern) and keys that affect
    only training need no entry. Any other difference is an error."""
    verify: bool = True
    """Verify all checksums before loading. false: skip the checksums of tensor files."""
    max_failed_saves: Count = 5
    """End the run after this number of failed saves in a row. 0: never."""
    allow_changed_data: bool = False
    """Allow a resume with data sources or weights that differ from the checkpoint's. Each source continues at its
    position."""


class Evaluate(Section):
    """Held-out loss and text samples while training."""

    interval: Annotated[Count, VALIDATION] = 1000
    """Steps between evaluations on data.validation. Another evaluation follows the last step. 0: never."""
    sequences: Annotated[Positive, unused_if("evaluate.interval", 0), VALIDATION] = 64
    """Number of sequences per held-out source, spread over the whole source. Evaluations of one sequence length read the same
    sequences."""
    tasks: ListOf[Text] = ()
    """Names of lm-eval tasks, or of your own tasks, on which to score the model. Needs the extra forge[eval] and a
    tokenizer."""
    tasks_interval: Annotated[Count, TASKS] = 1000
    """Steps between scorings of `tasks`. Another scoring follows the last step. 0: never."""
    tasks_path: Annotated[str, TASKS] = ""
    """Folder with your own tasks, as for lm-eval's --include_path. Empty: none."""
    tasks_limit: Annotated[Count, TASKS] = 0
    """Number of questions to score in each task, beginning with the first. 0: all."""
    sample_interval: Annotated[Count, TOKENIZER] = 0
    """Steps between generated text samples. Another sample follows the last step. 0: never."""
    sample_prompt: Annotated[str, SAMPLES] = ""
    """Prompt of the samples. Empty: samples begin like a document; this needs a tokenizer with a begin or end token."""
    sample_tokens: Annotated[Positive, SAMPLES] = 64
    """Tokens per sample."""
    sample_temperature: Annotated[NonNegativeNumber, SAMPLES] = 0.8
    """Sampling temperature. Values below 1 favour likely tokens; 0: always take the likeliest token."""


class Metrics(Section):
    """The metrics and reports of a run."""

    log_interval: Positive = 10
    """Steps between lines in the log and in metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    expert_map_interval: Annotated[Count, NO_EXPERTS] = 1000
    """Mixture of experts: steps between reports of the load per layer and expert, as images in TensorBoard and as
    counts in metrics.jsonl. 0: never."""
    monitor_interval: Count = 0
    """Steps between reports of the monitors, see docs/guides/monitors.md. 0: never."""
    monitors: Annotated[ListOf[Monitor], MinLen(1), unused_if("metrics.monitor_interval", 0)] = MONITORS
    """Monitored quantities, for each layer or matrix: activations (including dead and saturated units), gradients,
    weights, updates, attention (logits and entropy), experts (entropy of scores and load)."""
    sources: bool = False
    """Also report the loss of each source in data.sources and the loss by position in the sequence, in each line of
    metrics."""
    wandb: str = ""
    """Weights & Biases project for the curves. Needs the package wandb. Empty: none."""
    mlflow: str = ""
    """MLflow experiment for the curves. Needs the package mlflow. Empty: none."""
    live: bool = False
    """On a terminal, redraw a live view instead of writing log lines. Elsewhere: no effect."""
    peak_tflops: NonNegativeNumber = 0.0
    """Peak speed of one device in TFLOP/s, for MFU. 0: look up the GPU's name in a table; MFU is not reported for
    unknown GPUs."""

    @property
    def trackers(self) -> dict[str, str]:
        """Return tracker name -> project or experiment ("": off)."""
        return {"wandb": self.wandb, "mlflow": self.mlflow}


class Profile(Section):
    """Traces of selected steps, with the time and memory of each operation."""

    span: StepRange = ()
    """First and last step to profile, e.g. [10, 12]. []: none."""
    ranks: Annotated[ListOf[Count], PROFILES] = (0,)
    """Ranks to trace. Tracing many steps or ranks is slow and takes much disk space."""
    memory_snapshot: Annotated[bool, PROFILES] = False
    """Also record every CUDA memory allocation in these steps."""


class Resilience(Section):
    """Timeouts, skipped steps, rollbacks and checks for faults."""

    setup_timeout_s: NonNegativeNumber = 3600.0
    """Time limit in seconds from the start to the first step, including the loading of a checkpoint. If exceeded, the
    watchdog writes the stacks of every rank and ends the run with exit code 76. 0: off."""
    first_step_timeout_s: NonNegativeNumber = 3600.0
    """Watchdog limit in seconds for the first step, which compiles. 0: off."""
    step_timeout_s: NonNegativeNumber = 1800.0
    """Watchdog limit in seconds for every other step, including the wait for data. After a few steps, the limit becomes
    the larger of five minutes and 20 times the median step time, but at most this number. 0: off."""
    evaluate_timeout_s: NonNegativeNumber = 3600.0
    """Watchdog limit in seconds for an evaluation and its samples. 0: off."""
    save_timeout_s: NonNegativeNumber = 3600.0
    """Watchdog limit in seconds for the blocking part of a save, including the wait for the previous save. 0: off."""
    time_limit_s: NonNegativeNumber = 0.0
    """Time limit of the run in seconds. The run saves and stops with exit code 75 before the limit, early enough for
    the slowest save and the slowest evaluation so far. 0: off."""
    max_skipped_steps: Positive = 10
    """Roll back after this number of skipped steps in a row."""
    max_rollbacks: Count = 2
    """Maximum number of rollbacks without a new checkpoint in between; at the next one, the run fails with a report. A
    rollback returns to the last good checkpoint and skips the data of the steps since then."""
    rerun_skipped_steps: bool = True
    """Recompute the gradient of a skipped step, to find out whether the fault is transient or caused by data or
    parameters, and to name the tensors and ranks. Other steps are not slower."""
    spikes: Literal["report", "skip", "rollback"] = "report"
    """Reaction to a spike, i.e. a loss or gradient norm far above the recent median. report: write an event. skip: also
    skip the step, as for non-finite gradients. rollback: roll back at once."""
    spike_threshold: PositiveNumber = 10.0
    """Distance above the median, in standard deviations (robustly estimated from the window), that counts as a spike."""
    spike_window: Positive = 128
    """Number of previous steps for the medians of loss and gradient norm. No spike is reported before half of these
    steps. A phase with other data, windows or sequence length, or with smaller steps, starts over."""
    check_replicas: bool = True
    """Before each save, compare digests of replicated tensors between ranks. If digests differ, nothing is saved and
    the run rolls back, without skipping data."""
    straggler_interval: Count = 100
    """Steps between comparisons of the speed of all ranks. 0: never."""
    straggler_factor: Annotated[float, Gt(1), STRAGGLERS] = 1.3
    """Report a rank that lengthens steps by this factor and by at least 10 ms."""
    drain_stragglers: Annotated[Count, STRAGGLERS] = 0
    """Elastic runs: after this number of consecutive straggler reports for a rank, the rank's node leaves the run, if
    enough nodes remain. 0: never."""


class Ladder(Section):
    """The depth dial: one key for the size of a dense model and of its run. Keys that are set keep their values."""

    depth: Count = 0
    """Number of layers n. It sets model.dim = 64 n, n_layers, n_heads and n_kv_heads = n, head_dim = 64, ffn_dim = 8/3
    dim (a multiple of 64), and train.global_batch_size = 8 n^1.5 (a power of two). On the command line, depth replaces
    these keys of the file. 0: off."""
    tokens_per_parameter: Annotated[PositiveNumber, unused_if("ladder.depth", 0)] = 20.0
    """Tokens for each parameter, embeddings included. Sets train.tokens if train.steps and train.tokens are not set."""


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
    ladder: Ladder = Ladder()
