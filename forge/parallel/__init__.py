"""Distribute one model over many ranks.

The package makes the meshes, applies a layout to the model in a fixed order, and runs the distributed part of a
training step.
"""
