"""Replays: the executions of a recording, run again on a driver, and compared."""
