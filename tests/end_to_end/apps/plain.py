"""An application as a beginner writes it: at module level, without `if __name__`, without closing anything.

plain.py [SOCKET]: prints the driver's pid and a result, reads a line, and ends as that line says.
"""

import os
import sys

import numpy as np
from support.models import null_model

import nnfmq

client = nnfmq.connect(*sys.argv[1:], embedded=None if sys.argv[1:] else True)
model = client.device("reference").prepare(null_model())
burst = model.burst()
print(client.worker_pid, flush=True)
print(burst.execute(np.float32([4.5]))[0][0], flush=True)
if sys.stdin.readline() == "_exit\n":
    os._exit(0)
