"""The life of a run: launch, resume, roll-back, saves, copies, and the report of its end."""
