"""A program that computes on one CPU until it is killed: busy_loop.py CPU. It prints a line when it has begun."""

from __future__ import annotations

import os
import sys

os.sched_setaffinity(0, {int(sys.argv[1])})
print("computes", flush=True)
while True:
    pass
