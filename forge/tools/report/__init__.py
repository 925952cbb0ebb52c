"""What a run's directory says: one page about one run or several, and what went wrong in a run that failed."""
