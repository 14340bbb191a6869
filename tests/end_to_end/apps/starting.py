"""Connects to an embedded driver that cannot start yet, prints the driver's pid, and waits for a line."""

import os
import sys

from support.drivers import Process

import nnfmq

client = nnfmq.connect(embedded=True)
with Process(os.getpid()) as application:
    print(*application.children(), flush=True)
sys.stdin.readline()
