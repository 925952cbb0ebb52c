"""What a run reads, optimises, saves and reports."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import AfterValidator, Field, Strict, StringConstraints

from forge.config.section import (
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
)

FileName = Annotated[
    str, StringConstraints(pattern=r"^[^/\x00]*[^/.\x00][^/\x00]*$"), Phrase("a file name without /")
]
S = TypeVar("S", bound=Section)
Beta = Annotated[float, Ge(0), Lt(1)]


def _first_and_last(steps: tuple[int, ...]) -> tuple[int, ...]:
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise ValueError("needed: the first and the last step, as in [10, 12], or [] for none")
    return steps


StepRange = Annotated[ListOf[Positive], AfterValidator(_first_and_last)]


class Run(Section):
    """Which run this is and where its files go."""

    name: FileName = Field(
        default="run", json_schema_extra={"default": "the config's file name without .toml"}
    )
    """Name of the run; its files are in output_dir/name."""
    output_dir: Text = "runs"
    """Folder of all runs."""
    seed: Count = 0
    """Decides initial weights and the order of the data."""
    deterministic: bool = False
    """Only deterministic kernels: bit-equal repetitions on the same hardware, at some cost in speed."""


class Stream(Section):
    """Where tokens are."""

    path: Text
    """A folder made by scripts/prepare_data.py; a `.bin` of bare token ids; a Megatron dataset (its `.idx`, or the
    prefix of both files); or `synthetic`: endless, learnable, needs no file."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Of the ids in a `.bin`, which needs it."""
    eos_id: Count | None = None
    """The id that ends a document in a `.bin`. Without it the file is one document."""


class SourceConfig(Stream):
    """A stream of training tokens."""

    weight: NonNegativeNumber = 1.0
    """Share of the samples, relative to the other sources; 0: none."""


class ValidationConfig(Stream):
    """A held-out stream."""

    name: Text
    """Its name in logs and metrics."""


class Data(Section):
    """What is read, in which proportions."""

    sources: Annotated[ListOf[SourceConfig], MinLen(1)]
    """Training data: folders made by scripts/prepare_data.py, raw `.bin` (these need dtype), Megatron `.idx`, or
    `synthetic`. Weights need not sum to one."""
    tokenizer: Text = "bytes"
    """A SentencePiece .model file, a Hugging Face tokenizer.json, a folder that holds one of them, `bytes` (one token
    per byte, no file), or `none`: the ids of foreign data are all there is, no text is shown."""
    document_mask: bool = False
    """Documents that share a sequence do not see each other."""
    validation: ListOf[ValidationConfig] = ()
    """Held-out data, read every evaluate.interval steps. []: none."""
    mixture_block: Positive = 1024
    """Samples in which the proportions of the sources hold exactly (rounded to samples)."""
    prefetch: Positive = 2
    """Steps whose batches are read ahead."""


class OptimizerConfig(Section):
    """How gradients change parameters."""

    name: Literal["adamw"] | ImportPath = "adamw"
    """Rule of the update. A class of your own has its keys in a table of its own; see docs/extending/optimizer.md."""
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    weight_decay: NonNegativeNumber = 0.1
    """Decoupled decay per step, in units of the learning rate."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Memory of the first and second moment."""
    eps: PositiveNumber = 1e-8
    """Added to the root of the second moment."""
    no_decay: ListOf[Text] = ("*norm.weight", "*.bias", "embedding.weight")
    """Globs over parameter names that are not decayed."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of both moments; float32 means precision.storage where that is wider."""

    def table(self, keys: type[S]) -> S:
        """Return the table within [optimizer] whose class is `keys`."""
        return next(value for _, value in self if isinstance(value, keys))


class ScheduleConfig(Section):
    """The learning rate over the steps: warm-up, plateau, decay."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """wsd decays at the end only, cosine and linear from the warm-up on, constant never."""
    warmup_steps: Count = 0
    """Steps of linear warm-up to the peak. A run shorter than this ends within it."""
    decay_fraction: Share = 0.2
    """wsd: share of train.steps in the final decay."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """wsd: shape of the final decay."""
    min_lr_ratio: Share = 0.1
    """Learning rate of the last step, relative to the peak."""


class Train(Section):
    """The batch, its length, and for how long."""

    steps: Positive
    """Optimizer steps, counted from the beginning of the history, not from a resume."""
    seq_len: Positive
    """Tokens in a sequence."""
    global_batch_size: Positive
    """Sequences in an optimizer step: accumulation * micro_batch_size * data-parallel ranks."""
    micro_batch_size: Positive = 1
    """Sequences per rank and forward."""
    grad_clip_norm: NonNegativeNumber = 1.0
    """Gradients are scaled down to this global norm. 0: off."""
    z_loss_coef: NonNegativeNumber = 0.0
    """Weight of the mean squared logsumexp of the output logits, which keeps them from drifting."""
    loss_chunk_tokens: Positive = 1024
    """Tokens whose logits are held at once."""
    gc_interval: Count = 100
    """Steps between Python garbage collections, made by all ranks together. 0: leave it to Python."""


class Checkpoint(Section):
    """What is saved, and where a run begins."""

    interval: Count = 0
    """Steps between checkpoints. 0: only the final one, and one when asked to stop."""
    keep_last: Count = 3
    """Newest checkpoints that are kept. 0: all."""
    keep_every: Count = 0
    """Checkpoints at multiples of this step are never removed. 0: off."""
    mode: Literal["async", "sync"] = "async"
    """Write in the background while training goes on, or wait."""
    resume: Text = "auto"
    """`auto`: from the newest good checkpoint of this run. `none`. Or a checkpoint, whose history goes on."""
    init: str = ""
    """A checkpoint or imported folder whose weights a new history begins with. Empty: fresh weights."""
    verify: bool = True
    """Compare all checksums before loading. Else those of the tensors' files are left out."""
    max_failed_saves: Count = 5
    """Failed saves in a row after which the run ends. 0: it trains on whatever fails."""
    allow_changed_data: bool = False
    """Resume although the data are not those that the checkpoint was trained on."""


class Evaluate(Section):
    """Held-out loss and text samples while training."""

    interval: Count = 0
    """Steps between evaluations on data.validation; there is one after the last step, too. 0: never."""
    sequences: Positive = 64
    """Sequences per held-out source, always the same ones."""
    sample_interval: Count = 0
    """Steps between samples of what the model writes; there is one after the last step, too. 0: never."""
    sample_prompt: str = ""
    """What a sample begins with."""
    sample_tokens: Positive = 64
    """Tokens in a sample."""
    sample_temperature: NonNegativeNumber = 0.8
    """Below 1: likelier tokens are drawn more often. 0: always the likeliest."""


class Metrics(Section):
    """What is reported."""

    log_interval: Positive = 10
    """Steps between lines on the screen and in metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    expert_map_interval: Count = 1000
    """Steps between pictures of the load by layer and expert in TensorBoard, and the counts behind them in metrics.jsonl,
    of a mixture of experts. 0: never."""
    peak_tflops: NonNegativeNumber = 0.0
    """Peak of one device in TFLOP/s, for MFU. 0: from the card's name; an unknown card reports no MFU."""


class Profile(Section):
    """Traces of chosen steps, for the question where the time and the memory go."""

    span: StepRange = ()
    """First and last step to profile, as in [10, 12]. []: none."""
    ranks: ListOf[Count] = (0,)
    """Ranks that write a trace; a trace of many steps or ranks is large and slows the run."""
    memory_snapshot: bool = False
    """Also record every allocation on the CUDA cards in these steps."""


class Resilience(Section):
    """What happens when something goes wrong."""

    setup_timeout_s: NonNegativeNumber = 3600.0
    """Seconds from the start to the first step, reading a checkpoint included, after which the watchdog writes the
    stacks of every rank and ends the run with exit code 76. 0: off."""
    first_step_timeout_s: NonNegativeNumber = 3600.0
    """The same for the first step, which compiles. 0: off."""
    step_timeout_s: NonNegativeNumber = 1800.0
    """The same for every other step, and for the wait for its data. Some ten times a step are enough. 0: off."""
    evaluate_timeout_s: NonNegativeNumber = 3600.0
    """The same for an evaluation with its samples. 0: off."""
    save_timeout_s: NonNegativeNumber = 3600.0
    """The same for the part of a save that training waits for, the one before it included. 0: off."""
    time_limit_s: NonNegativeNumber = 0.0
    """Seconds within which the run saves and stops with exit code 75, as upon a signal; it stops early enough for its
    slowest save so far. 0: off."""
    max_skipped_steps: Positive = 10
    """Skipped steps in a row after which the run rolls back."""
    max_rollbacks: Count = 2
    """Returns to the last good checkpoint, passing over the data of the steps since, without a later checkpoint in
    between. After that the run ends with what it knows."""
    rerun_skipped_steps: bool = True
    """Compute the gradient of a skipped step once more, to tell a transient fault from one that the data or the
    parameters cause, and to name tensors and ranks. Costs nothing in good steps."""
    spikes: Literal["report", "skip", "rollback"] = "report"
    """What follows a loss or gradient norm far above its like: an event alone; the step changes nothing, as if it were
    not finite; or a roll-back at once."""
    spike_threshold: PositiveNumber = 10.0
    """How far above the median a spike is, in standard deviations, robustly estimated from the window."""
    spike_window: Positive = 128
    """Steps whose loss and gradient norm say what is usual; there are no spikes until half of them are there."""
    check_replicas: bool = True
    """Compare digests of what several ranks hold copies of before each save. A difference rolls the run back, without
    passing over data, and is never saved."""
    straggler_interval: Count = 100
    """Steps between comparisons of all ranks' speeds. 0: never."""
    straggler_factor: Annotated[float, Gt(1)] = 1.3
    """A rank that makes steps longer by this factor, and by 10 ms at least, is named."""
