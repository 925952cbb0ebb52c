"""Handle stop requests, hangs, stragglers, loss spikes, and replicas that differ."""
