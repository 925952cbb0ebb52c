"""Elastic runs: a rendezvous server and one agent per node, which start the ranks and replace lost nodes."""
