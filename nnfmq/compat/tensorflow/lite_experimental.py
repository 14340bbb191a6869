"""The part of `tf.lite.experimental` that `tf.lite.Interpreter` takes."""

from nnfmq.compat.litert import OpResolverType, load_delegate

__all__ = ["OpResolverType", "load_delegate"]
