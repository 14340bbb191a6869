"""The compiled core has the class of the Python core, with the same signatures, and workers."""

from nnfmq.engines.compiled._pypool import LaunchCore as LaunchCore

MAX_WORKERS: int
