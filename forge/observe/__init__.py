"""What a run reports: its directory, metrics, events, TensorBoard, logs, memory and progress line."""
