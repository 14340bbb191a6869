"""Find faces in a photo, a video or the pictures of a camera, and print a box for each.

python faces.py photo.jpg                # a photo
python faces.py film.mp4                 # a video; pip install opencv-python-headless
python faces.py 0 --count 100            # 100 pictures of the first camera
"""

import argparse
from pathlib import Path

import numpy as np
from pictures import pictures

import nnfmq

MODEL = Path(__file__).parent / "data" / "face_detection_short_range.tflite"  # MediaPipe's BlazeFace, Apache-2.0
GRIDS = [(np.indices((size, size))[::-1].reshape(2, -1).T + 0.5) / size for size in (16, 8)]
CENTERS = np.vstack([GRIDS[0].repeat(2, axis=0), GRIDS[1].repeat(6, axis=0)])  # of the anchors: 2 and 6 in each cell


def boxes(raw: np.ndarray, logits: np.ndarray) -> list[np.ndarray]:
    """Return left, top, right, bottom and the score of each face, in parts of the picture's width and height."""
    scores = 1 / (1 + np.exp(-logits[0].clip(-50, 50)))
    middles, sizes = raw[0, :, :2] / 128 + CENTERS, raw[0, :, 2:4] / 128
    found: list[np.ndarray] = []
    for box in sorted(np.hstack([middles - sizes / 2, middles + sizes / 2, scores]), key=lambda box: -box[4]):
        if box[4] > 0.5 and all(overlap(box, other) < 0.3 for other in found):
            found.append(box)
    return found


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the intersection of two boxes over their union."""
    common = np.prod(np.maximum(0, np.minimum(a[2:4], b[2:4]) - np.maximum(a[:2], b[:2])))
    return common / (np.prod(a[2:4] - a[:2]) + np.prod(b[2:4] - b[:2]) - common)


def main() -> None:
    """Print the boxes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a photo, a video, or the number of a camera")
    parser.add_argument("--count", type=int, default=1 << 62, help="stop after so many pictures")
    arguments = parser.parse_args()
    with nnfmq.connect() as client, client.prepare(MODEL).burst() as burst:
        for number, picture in zip(range(arguments.count), pictures(arguments.source), strict=False):
            pixels = np.asarray(picture.resize((128, 128)), np.float32) / 127.5 - 1
            for box in boxes(*burst.execute(pixels)):
                left, top, right, bottom = (box[:4] * (2 * picture.size)).round().astype(int)
                print(f"picture {number}: a face from {left},{top} to {right},{bottom}, score {box[4]:.2f}")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError, nnfmq.InvalidArgument) as error:
        raise SystemExit(str(error) or 130) from None
