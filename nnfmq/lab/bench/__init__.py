"""Measurements of latency: load loops, runners in processes of their own, percentiles, reports, comparisons.

`nnfmq bench` and the benchmarks in `tools/` are made of these modules. The arithmetic is separate from what starts
processes.
"""
