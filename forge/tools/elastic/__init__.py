"""Elastic runs: a rendezvous server, and one agent per node. Agents start the ranks; lost nodes are replaced."""
