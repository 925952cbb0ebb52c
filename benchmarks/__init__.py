"""Benchmarks: forge and a plain alternative, measured in the same run and compared by ratios (benchmarks/README.md)."""
