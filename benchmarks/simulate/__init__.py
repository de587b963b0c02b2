"""A discrete-event simulator of prefill and decode pods with measured step costs."""
