"""Training by other packages on a task from benchmarks/side_by_side.py; `python -m benchmarks.peers` runs one package.

Each package has its own module here. The module imports the package, PyTorch and task.py, but nothing of forge.
"""
