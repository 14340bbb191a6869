"""Find the paragraphs of a folder's .md and .txt files that are the most like a question.

python embed.py "what happens to a client when the driver dies" docs

A model turns each text into 48 numbers. Texts about the same have similar ones.
"""

import argparse
import re
import zlib
from pathlib import Path

import numpy as np

import nnfmq

MODEL = Path(__file__).parent / "data" / "words.tflite"  # tools/example_models.py writes it
ROWS, LENGTH = 2048, 64  # of the table of words; the number of words of an input


def words(text: str) -> np.ndarray:
    """Return the table's rows of a text's words; row 0 fills the input up. Words that begin alike share a row."""
    stems = [word[:6] for word in re.findall(r"[a-z]{3,}", text.lower())][:LENGTH]
    rows = [1 + zlib.crc32(stem.encode()) % (ROWS - 1) for stem in stems]
    return np.array([rows + [0] * (LENGTH - len(rows))], np.int32)


def paragraphs(folder: Path) -> list[tuple[str, str]]:
    """Return each paragraph of prose, with its file and line."""
    found = []
    for path in sorted(path for suffix in ("md", "txt") for path in folder.rglob(f"*.{suffix}")):
        line = 1
        for part in path.read_text("utf-8", errors="replace").split("\n\n"):
            if re.match(r"[A-Z*`-][^|{]{80,}$", part.strip()):
                found.append((f"{path}:{line}", " ".join(part.split())))
            line += part.count("\n") + 2
    return found


def main() -> None:
    """Print the paragraphs that are nearest to the question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    texts = paragraphs(arguments.folder) or parser.error(f"{arguments.folder} has no .md or .txt file with prose")
    with nnfmq.connect() as client, client.prepare(MODEL).burst() as burst:
        (question,) = burst.execute(words(arguments.question))
        vectors = np.array([burst.execute(words(text))[0][0] for _, text in texts])
        for index in (vectors @ question[0]).argsort()[:-4:-1]:
            print(f"{vectors[index] @ question[0]:.2f} {texts[index][0]}\n     {texts[index][1][:100]}")
        print(f"{len(texts)} paragraphs, the last one in {burst.last.latency_ns / 1000:.0f} µs")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError, nnfmq.InvalidArgument) as error:
        raise SystemExit(str(error) or 130) from None
