"""The training run: assembling the parts, the loop, evaluation, saving and resuming."""
