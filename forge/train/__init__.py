"""The training loop: one optimizer step, its results, evaluation, monitors and training state."""
