"""Decides which request gets which tokens and blocks in the next step: state machines without torch
or I/O."""
