"""Nodes that come and go: what runs beside a training run and starts its ranks."""
