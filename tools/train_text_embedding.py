"""Learn vectors of words for docs/examples/embed.py: `python3 tools/train_text_embedding.py` (seconds).

Texts: the paragraphs of this project's documentation. Method: latent semantic analysis. Each word has a row of a table
by its hash; a text is the vector of how often it has the words of each row, weighted by how rare they are (idf); the
first right singular vectors of all texts give each row 48 numbers. Words of the same paragraphs get similar ones.

Writes words.tflite: row numbers (1, 64) in, a vector of length 1 out. The table is quantized to int8 with one scale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tflite_writer import Operator, Tensor, write

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
DIMENSIONS = 48

sys.path.insert(0, str(EXAMPLES))
import embed  # type: ignore[import-not-found]  # noqa: E402  how a text becomes row numbers


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=ROOT / "docs", help="folder (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=EXAMPLES / "data" / "words.tflite")
    arguments = parser.parse_args()
    rows = np.vstack([embed.words(text) for _, text in embed.paragraphs(arguments.texts)])
    arguments.out.write_bytes(model(table_of(rows)))


def table_of(rows: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the table from the row numbers of each text. A row without words is zero, and so is row 0."""
    counts = np.zeros((len(rows), embed.ROWS))
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1)
    counts[:, 0] = 0
    rarity = np.log((1 + len(rows)) / (1 + (counts > 0).sum(axis=0)))
    weighted = np.log1p(counts) * rarity
    weighted /= np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9)
    _, _, directions = np.linalg.svd(weighted, full_matrices=False)
    table = directions[:DIMENSIONS].T * rarity[:, None]
    table[counts.sum(axis=0) == 0] = 0
    result: NDArray[np.float32] = table.astype(np.float32)
    return result


def model(table: NDArray[np.float32]) -> bytes:
    """Return the file: GATHER, DEQUANTIZE, SUM and L2_NORMALIZATION."""
    scale = float(np.abs(table).max()) / 127
    stored = np.round(table / scale).astype(np.int8)
    shape = (1, embed.LENGTH, DIMENSIONS)
    tensors = [
        Tensor("words", (1, embed.LENGTH), "INT32"),
        Tensor("table", stored.shape, "INT8", stored.tobytes(), (scale,), (0,)),
        Tensor("rows", shape, "INT8", None, (scale,), (0,)),
        Tensor("vectors", shape),
        Tensor("axis", (1,), "INT32", np.array([1], np.int32).tobytes()),
        Tensor("sum", (1, DIMENSIONS)),
        Tensor("embedding", (1, DIMENSIONS)),
    ]
    operators = [
        Operator("GATHER", (1, 0), (2,), "GatherOptions", {"Axis": 0}),
        Operator("DEQUANTIZE", (2,), (3,), "DequantizeOptions"),
        Operator("SUM", (3, 4), (5,), "ReducerOptions", {"KeepDims": False}),
        Operator("L2_NORMALIZATION", (5,), (6,), "L2NormOptions"),
    ]
    return write(tensors, operators, (0,), (6,), "Vectors of texts")


if __name__ == "__main__":
    main()
