"""Executes a model on two drivers, whose sockets are the arguments, over a burst, until it is killed.

It prints the pids of the workers when it has executed once.
"""

import sys

import numpy as np
from support.partitioned import infos_of
from support.plans import linear_plan
from support.small_models import two_adds

import nnfmq
from nnfmq.client.partitioned.model import PartitionedModel

plan = linear_plan(two_adds(), [0], [1])
clients = [nnfmq.connect(path) for path in sys.argv[1:]]
steps = [
    client.device("reference").prepare(step.model) for client, step in zip(clients, plan.execution_steps, strict=True)
]
model = PartitionedModel(plan, steps, None, *infos_of(plan.model))
burst = model.burst()
burst.execute(np.ones((2, 2)), np.ones((2, 2)))
print(*(client.worker_pid for client in clients), flush=True)
while True:
    burst.execute(out=burst.outputs)
