"""An application of which one thread waits for a result while another one forks.

forks_while_waiting.py SOCKET: prints the driver's pid, reads a line, begins; prints the child's status and the result.
"""

from __future__ import annotations

import os
import sys

from support.drivers import InThread, one, wait_until_waiting
from support.forking import fork
from support.models import null_model

import nnfmq

client = nnfmq.connect(sys.argv[1])
model = client.device("reference").prepare(null_model())
burst = model.burst(polling_window_us=0)
burst.execute(one(1))
print(client.worker_pid, flush=True)
sys.stdin.readline()
call = InThread.start(lambda: burst.execute(one(2)))
wait_until_waiting(burst)
call.wait_until_asleep()
child = fork()
if not child:
    try:
        burst.execute(one(3), timeout=0)
    except nnfmq.DeadObject:
        burst.close()
        model.close()
        client.close()
        os._exit(0)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(call.wait().value[0][0], flush=True)
client.close()
