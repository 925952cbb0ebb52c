"""Handle stop requests, hangs, stragglers, loss spikes and differing replicas."""
