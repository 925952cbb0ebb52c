"""A pipeline: groups of ranks that hold different layers, and the order in which microbatches go through them."""

from forge.parallel.pipeline.execute import Part, PipelinedModel
from forge.parallel.pipeline.plan import plan_pipeline
from forge.parallel.pipeline.stages import Stage

__all__ = ["Part", "PipelinedModel", "Stage", "plan_pipeline"]
