"""The lowest layer: processes, files, networks, errors and library versions. Imports nothing else of forge."""
