"""What a run reports about itself: its directory, metrics, events, TensorBoard, logs and progress line."""
