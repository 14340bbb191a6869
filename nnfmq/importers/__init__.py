"""Model files → `hal.types.Model`. One module per file format; a format's own package is imported when it is used."""

from nnfmq.importers.examples import example_path
from nnfmq.importers.tflite import LoadedModel, load

__all__ = ["LoadedModel", "example_path", "load"]
