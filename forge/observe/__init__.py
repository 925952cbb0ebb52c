"""What a run tells of itself: its directory, metrics, events, TensorBoard, logs and progress line."""
