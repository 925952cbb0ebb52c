"""Plan the needs of a run before it starts: the real model and step on fake tensors, for any world size, in one CPU
process.
"""
