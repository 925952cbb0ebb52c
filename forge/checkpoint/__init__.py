"""Checkpoints: saving, finding, verifying, loading into any layout. Start reading at `store.Checkpoints`."""

from forge.checkpoint.loading import load, read_config, read_state
from forge.checkpoint.store import Checkpoints, SaveOutcome
from forge.checkpoint.tensors import NamedTensors, ShardTensor

__all__ = ["Checkpoints", "NamedTensors", "SaveOutcome", "ShardTensor", "load", "read_config", "read_state"]
