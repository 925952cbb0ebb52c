"""Many runs: sweeps of keys, laws fitted to their results, and the growth of activations with the width."""
