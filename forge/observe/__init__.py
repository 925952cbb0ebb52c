"""Reports of a run: its directory, metrics, events, TensorBoard, logs, memory and progress line."""
