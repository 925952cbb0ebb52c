"""Many runs: sweeps of keys, laws fitted to their results, and sizes of activations over widths."""
