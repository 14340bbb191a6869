"""Traces and statistics that processes record of themselves, and their evaluation. Every part may import it."""
