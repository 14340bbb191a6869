"""A process with a fence: sends it over the channel whose descriptor is given, and signals or fails when it is told so.

signals.py FD: reads lines, "signal" or "fail".
"""

from __future__ import annotations

import sys

import nnfmq
from nnfmq.base.channel import Channel

with nnfmq.Fence.create() as fence, Channel.adopt(int(sys.argv[1])) as channel:
    channel.send(b"fence", [fence.fileno()])
    for line in sys.stdin:
        getattr(fence, line.strip())()
