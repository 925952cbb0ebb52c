"""Checkpoints: save, find, verify, and load into any layout. Start reading at `store.Checkpoints`."""

from forge.checkpoint.folders import find_checkpoint
from forge.checkpoint.loading import load, read_config, read_state, saved_config, trained_config
from forge.checkpoint.manifest import find_damage, read_digest
from forge.checkpoint.store import Checkpoints, SaveOutcome
from forge.checkpoint.tensors import NamedTensors, ShardTensor

__all__ = [
    "Checkpoints",
    "NamedTensors",
    "SaveOutcome",
    "ShardTensor",
    "find_checkpoint",
    "find_damage",
    "load",
    "read_config",
    "read_digest",
    "read_state",
    "saved_config",
    "trained_config",
]
