"""Worst cases of latency under disturbances, and the cause of each from evidence: `nnfmq stress`.

Clients record each request with counters of the kernel, and a sampler records what cannot be read for each request.
`attribution` names causes from these records alone: it does not know which disturbances were started.
"""
