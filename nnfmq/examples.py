"""Files that come with the package, for the demo, the README and a first try."""

from __future__ import annotations

from pathlib import Path

from nnfmq.hal.errors import InvalidArgument


def example_path(name: str) -> Path:
    """Return the path of a packaged example, as "digits.tflite". Raises InvalidArgument that lists what there is."""
    directory = Path(__file__).parent / "data"
    path = directory / name
    if path.parent != directory or not path.is_file():
        known = ", ".join(sorted(entry.name for entry in directory.iterdir() if entry.is_file()))
        raise InvalidArgument(f"there is no example {name!r}; the package has: {known}")
    return path
