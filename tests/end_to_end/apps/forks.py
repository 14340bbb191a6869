"""An application that forks: the child lives on after it, with whatever it inherited.

forks.py SOCKET|embedded: prints the driver's pid and the child's.
"""

from __future__ import annotations

import signal
import sys

from support.drivers import one
from support.forking import fork
from support.models import null_model

import nnfmq

target = sys.argv[1]
client = nnfmq.connect(embedded=True) if target == "embedded" else nnfmq.connect(target)
burst = client.device("reference").prepare(null_model()).burst()
burst.execute(one(1))
child = fork()
if child:
    print(client.worker_pid, flush=True)
    print(child, flush=True)
signal.pause()
