"""Commands, one per file. Shared code: options.py for all, model.py for trained models, images.py for plots, planned.py."""
