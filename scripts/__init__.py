"""Commands, one per file. Shared code: options.py, model.py (trained models), images.py (plots), planned.py (plans)."""
