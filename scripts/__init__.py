"""Commands: each file is one. Shared code: options.py; model.py for commands on a trained model; images.py for plots."""
