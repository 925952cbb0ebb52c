"""Other packages train the model that benchmarks/side_by_side.py writes down. One program for each, run under torchrun.

They import their package, PyTorch and task.py, and nothing of forge.
"""
