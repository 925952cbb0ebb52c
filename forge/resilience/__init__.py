"""Stopping in good order, and decisions that all ranks take at the same step."""
