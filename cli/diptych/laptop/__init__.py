"""Runs the rendered objects as processes of one machine, for laptops and tests."""
