"""Commands, each a file to run. Shared code: options.py; model.py for commands on a trained model; images.py for plots."""
