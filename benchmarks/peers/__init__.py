"""Other packages train the task that benchmarks/side_by_side.py writes down; `python -m benchmarks.peers` is the program.

A module for each package. They import their package, PyTorch and task.py, and nothing of forge.
"""
