"""Pictures of a file or a camera, for faces.py."""

from collections.abc import Iterator

from PIL import Image


def pictures(source: str) -> Iterator[Image.Image]:
    """Yield the pictures of a photo, a video or a camera; a camera's never end.

    Raises:
        OSError: If the photo is not read.
        SystemExit: If the video or the camera is not opened, with the reason.
    """
    if source.lower().endswith((".jpg", ".jpeg", ".png")):
        return (yield Image.open(source).convert("RGB"))
    try:
        from cv2 import VideoCapture
    except ImportError as error:
        raise SystemExit(f"{error}: pip install opencv-python-headless") from None
    video = VideoCapture(int(source) if source.isdecimal() else source)
    if not video.isOpened():
        raise SystemExit(f"{source} is neither a photo, nor a video or a camera that OpenCV opens")
    while (frame := video.read())[0]:
        yield Image.fromarray(frame[1][:, :, ::-1])
