"""A model checker for the thread pool's protocol: it explores every interleaving of a caller and its workers.

It executes `_thread_pool.h` itself. The compiler of ThreadSanitizer calls a function at each access; `hooks.c` stops
the program there. `replay` finds a stopped program again by running the call from its start with the results so far.
`pool_memory` has the memory and what each thread knows of it, `pool_search` visits all states and checks them.
"""
