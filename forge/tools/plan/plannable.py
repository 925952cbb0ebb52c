"""`plannable`: a configuration without the features that cannot run on fake tensors."""

from __future__ import annotations

from typing import Any

from forge.config import Config
from forge.parallel.float8.formats import FORMATS
from forge.parallel.float8.gathering import may_gather_in_blocks


def plannable(config: Config) -> tuple[Config, list[str]]:
    """Return `config` without the features that cannot run on fake tensors, and notes on how a plan differs from the run."""
    changes: dict[str, Any] = {}
    warnings = []
    compiled = [f"compile.{key}" for key in ("enabled", "loss") if getattr(config.compile, key)]
    if compiled:
        changes["compile"] = config.compile.model_copy(update={"enabled": False, "loss": False})
        warnings.append(
            f"{' and '.join(compiled)}: memory is planned without compilation; compiled code keeps fewer activations"
        )
    if config.compile.optimizer:
        warnings.append(
            "compile.optimizer: the update is planned without compilation, so it is faster than planned"
        )
    # Fake tensors have no values to check and no CUDA. These keys change no memory that the plan counts.
    parallel = config.parallel
    traced = {"async_tp": False, "symmetric_memory": False, "check_gradients": "none"}
    if any(getattr(parallel, key) != value for key, value in traced.items()):
        changes["parallel"] = parallel.model_copy(update=traced)
    if parallel.check_gradients != "none":
        warnings.append("parallel.check_gradients: the time leaves out the check")
    for key in ("async_tp", "symmetric_memory"):
        if getattr(parallel, key):
            warnings.append(f"parallel.{key}: the time leaves out its gain")
    if parallel.cpu_offload:
        warnings.append(
            "parallel.cpu_offload: the time leaves out the copies between host and GPU and the update on the CPU"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        changes["activation_checkpoint"] = config.activation_checkpoint.model_copy(update={"mode": "none"})
        warnings.append(
            "activation_checkpoint.mode = memory_budget: the compiler chooses activations to keep; "
            "the plan assumes that all are kept"
        )
    if config.precision.float8 != "none":
        form = FORMATS.get(config.precision.float8)
        gathers = form is not None and may_gather_in_blocks(form, config)
        update = {"float8_emulate": True} if gathers else {"float8": "none"}
        changes["precision"] = config.precision.model_copy(update=update)
    if config.model.moe is not None:
        warnings.append("mixture of experts: planned with an equal load for all experts")
    return config.model_copy(update=changes), warnings
