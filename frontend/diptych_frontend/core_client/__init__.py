"""Clients of engine cores: requests over ZMQ, and the care of the processes behind them."""
