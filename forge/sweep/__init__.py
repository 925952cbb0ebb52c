"""Many runs: sweeps of keys, laws fitted to their results, averages of checkpoints, and sizes of activations over widths."""
