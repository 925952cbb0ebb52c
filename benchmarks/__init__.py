"""Measurements of forge against the plain alternative, in one run, as ratios (benchmarks/README.md)."""
