"""Training by other packages on a task from benchmarks/side_by_side.py; `python -m benchmarks.peers` runs one package.

Each package has its module, which imports the package, PyTorch and task.py, and nothing of forge.
"""
