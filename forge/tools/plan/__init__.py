"""Plan the memory, traffic and step time of a run before it starts.

One CPU process runs the real model and step on fake tensors, for any world size.
"""
