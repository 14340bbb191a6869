"""The part of `tf.lite` that runs models: that of `nnfmq.compat.litert`."""

from typing import NoReturn

from nnfmq.compat.litert import Interpreter
from nnfmq.compat.tensorflow import lite_experimental as experimental

__all__ = ["Interpreter", "experimental"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"nnfmq runs models and does not convert them: `tf.lite.{name}` needs TensorFlow itself")
