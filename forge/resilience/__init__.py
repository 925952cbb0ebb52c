"""Stopping after a save, hangs, slow ranks, spikes of the loss, and copies that differ."""
