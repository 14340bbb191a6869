"""Interfaces of other runtimes over nnfmq: one changed import moves a script into the driver."""
