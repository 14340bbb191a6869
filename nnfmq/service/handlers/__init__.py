"""Handlers of the client's calls, one module for each family."""
