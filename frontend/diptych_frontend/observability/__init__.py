"""What a process reports of itself: logs, metrics, traces, the lag of its event loop."""
