"""The compiled core has the class of the Python core, with the same signatures."""

from nnfmq.base._pysha256 import Sha256 as Sha256

def is_supported() -> bool:
    """Return whether this CPU has the instructions; without them the class raises RuntimeError."""
