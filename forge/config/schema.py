"""The whole configuration: one typed section per concern."""

from __future__ import annotations

from forge.config.layout import ActivationCheckpoint, Compile, Parallel, Pipeline, Precision
from forge.config.model import ModelConfig
from forge.config.section import Section
from forge.config.training import (
    Checkpoint,
    Data,
    Evaluate,
    Metrics,
    OptimizerConfig,
    Profile,
    Resilience,
    Run,
    ScheduleConfig,
    Train,
)


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
