"""Stopping after a save, hangs, stragglers, loss spikes, and replicas that differ."""
