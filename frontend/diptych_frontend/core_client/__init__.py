"""Clients of engine cores: they send requests over ZMQ, and manage the processes behind them."""
