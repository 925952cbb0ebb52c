"""Tools for many runs: sweeps over keys, scaling laws fitted to results, and coordinate checks across widths."""
