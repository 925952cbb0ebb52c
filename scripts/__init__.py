"""Commands, each a file to run. What they share: options.py, for those on a trained model model.py, for plots images.py."""
