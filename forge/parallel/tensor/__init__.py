"""Tensor and sequence parallelism: the plan of a model, and modules that compute on their shard."""
