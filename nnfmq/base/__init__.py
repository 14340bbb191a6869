"""The parts that every process of nnfmq needs and that know nothing of neural networks.

Sockets with file descriptors (`channel`), shared memory (`memory`, `posix_shm`), memory in files (`file_memory`),
fences, the watcher thread, deadlines, settings, paths, child processes, and the choice between compiled and Python
cores. Each kind of side effect that all processes have is in one module here. May import `hal` alone, for its errors
and types.
"""
