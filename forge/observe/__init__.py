"""What a run tells of itself: its directory, metrics, events, status, TensorBoard, logs and progress line."""
