"""What a process tells of itself: logs, metrics, traces, the lag of its loop."""
