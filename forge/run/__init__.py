"""A run's life: launch, resume, roll-back, saves, copies, and reports of how it ended."""
