"""What a run needs, before it runs: the real model and step on fake tensors, for any world size, in one CPU process."""
