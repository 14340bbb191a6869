"""A model checker for the queue's algorithm: it explores every interleaving of a few threads, one access at a time.

It executes `nnfmq.queue._pycore` itself. `instrumented_runtime` gives it memory, atomic operations, a futex and a clock
that stop the program at each access. `program` finds a stopped program again by running the call from its start with
the values that it has loaded so far. `models` defines how far a machine may delay accesses, `search` visits all states
and checks them, `scenarios` defines what the threads do, and `seeded_bugs` changes the source so that the search must
fail.
"""
