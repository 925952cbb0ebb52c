"""Elastic runs: a rendezvous server, and one agent per node. Agents start the ranks, and new nodes replace lost ones."""
