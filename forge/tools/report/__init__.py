"""Reports from run directories: a page about one or more runs, and the diagnosis of a failed run."""
