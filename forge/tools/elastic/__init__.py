"""Elastic runs: agents and the rendezvous, which start the ranks of a training run and replace lost nodes."""
