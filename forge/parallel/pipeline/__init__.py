"""A pipeline: groups of ranks with different layers, and the order in which microbatches pass through them."""

from forge.parallel.pipeline.execute import PipelinedModel, StageModel
from forge.parallel.pipeline.plan import Stage, plan_pipeline

__all__ = ["PipelinedModel", "Stage", "StageModel", "plan_pipeline"]
