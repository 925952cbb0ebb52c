"""Handle stop requests, hangs, stragglers and differing replicas."""
