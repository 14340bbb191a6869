"""Recordings: the executions of an application in a file, with their models, inputs, outputs and times."""
