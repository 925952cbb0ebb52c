"""Plan the needs of a run before it starts.

The real model and step run on fake tensors, for any world size, in one CPU process.
"""
