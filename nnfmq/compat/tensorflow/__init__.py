"""`tf.lite.Interpreter` over nnfmq, for scripts that import TensorFlow for nothing else.

import nnfmq.compat.tensorflow as tf
"""

from typing import NoReturn

from nnfmq.compat.tensorflow import lite

__all__ = ["lite"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"nnfmq.compat.tensorflow has `lite` alone: `tf.{name}` needs TensorFlow itself")
