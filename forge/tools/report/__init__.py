"""Reports from run directories: one page about one or several runs, and the diagnosis of a failed run."""
