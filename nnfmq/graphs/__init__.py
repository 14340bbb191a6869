"""Graphs of models and of their execution plans: NNAPI's graph dump, a shorter graph of the operations, and SVG."""
