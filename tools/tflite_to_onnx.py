"""Export a .tflite model to ONNX, in the form that ONNX Runtime executes fastest; see nnfmq/lab/bench/onnx_export.py.

python tools/tflite_to_onnx.py model.tflite model.onnx
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import nnfmq
from nnfmq.hal.errors import NnfmqError
from nnfmq.lab.bench.onnx_export import export_to_onnx


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 if the file was written, 1 if it was not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a .tflite file")
    parser.add_argument("output", metavar="FILE", type=Path, help="the .onnx file to write")
    options = parser.parse_args(arguments)
    try:
        exported = export_to_onnx(nnfmq.load(options.model).model)
        options.output.write_bytes(exported.proto.SerializeToString())
    except (NnfmqError, OSError) as error:
        print(f"tflite_to_onnx: error: {error}", file=sys.stderr)
        return 1
    if exported.is_shifted:
        print("inputs and outputs are uint8: the int8 values of the model plus 128")
    return 0


if __name__ == "__main__":
    sys.exit(main())
