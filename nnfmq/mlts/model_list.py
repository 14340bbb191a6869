"""The models of MLTS's scoring benchmark as a table: what is executed, on which data, and what is expected.

A classifier occurs twice: on photos (`_topk`), and on two photos with golden outputs. File names are relative to the
folder of MLTS's models, and are those of AOSP's `test/mlts/models`. A file that is not there is reported as missing.
"""

from __future__ import annotations

from dataclasses import dataclass

PHOTO_COUNT = 1490
"""The photos of MLTS's image_classification data set."""
SEQUENCE_COUNT = 50
"""The golden sequences of each of MLTS's recurrent models."""


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """One test of the benchmark.

    Attributes:
        name: The test's name, unique.
        file: The model's file, without `.tflite`.
        group: The heading in reports.
        golden: Pairs of files with inputs and golden outputs.
        golden_folder: Instead: the folder of these files, NAME.input and NAME.output.
        total: The number of photos or golden sequences that MLTS has for the test.
        expected_top1: The share of photos whose best class is right, as MLTS states it; 0 without photos.
        evaluator: The metric of the outputs: "top-k", "mel-cep-log-f0", "phone-error-rate", or "" for none but errors.
    """

    name: str
    file: str
    group: str
    golden: tuple[tuple[str, str], ...] = ()
    golden_folder: str = ""
    total: int = 0
    expected_top1: float = 0.0
    evaluator: str = ""

    @property
    def runs_on_photos(self) -> bool:
        """Whether the data are photos with labels."""
        return not self.golden and not self.golden_folder


_V1 = {  # width of the layers, side of the input: expected top-1 of the float and of the quantized model
    ("0.25", 128): (0.444, 0.402),
    ("0.5", 160): (0.582, 0.55),
    ("0.75", 192): (0.604, 0.582),
    ("1.0", 224): (0.617, 0.596),
}
_V2 = {
    ("0.35", 128): (0.516, None),
    ("0.5", 160): (0.583, None),
    ("0.75", 192): (0.617, None),
    ("1.0", 224): (0.639, 0.617),
}


def _classifiers() -> list[ScoringModel]:
    return [
        model
        for version, table in (("v1", _V1), ("v2", _V2))
        for is_quantized in (False, True)
        for (width, side), expected in table.items()
        if expected[is_quantized] is not None
        for model in _classifier(version, width, side, expected[is_quantized] or 0.0, is_quantized)
    ]


def _classifier(
    version: str, width: str, side: int, expected_top1: float, is_quantized: bool
) -> tuple[ScoringModel, ScoringModel]:
    """Return a classifier on photos and on its golden photos."""
    file = f"mobilenet_{version}_{width}_{side}{'_quant' if is_quantized else ''}"
    group = f"MobileNet {version} {'quantized' if is_quantized else 'float'}"
    folder = "mobilenet_quantized" if is_quantized else "mobilenet_float"
    label = f"{'v2_' if version == 'v2' else ''}{width}_{side}"
    golden = tuple((f"{folder}/{what}_{side}.input", f"{folder}/{what}_{label}.output") for what in ("cup", "banana"))
    return (
        ScoringModel(f"{file}_topk", file, group, (), "", PHOTO_COUNT, expected_top1, "top-k"),
        ScoringModel(file, file, group, golden, total=len(golden)),
    )


def _with_folder(file: str, group: str, total: int, evaluator: str = "") -> ScoringModel:
    return ScoringModel(file, file, group, golden_folder=file, total=total, evaluator=evaluator)


MODELS: tuple[ScoringModel, ...] = (
    *_classifiers(),
    _with_folder("ssd_mobilenet_v1_coco_float", "SSD MobileNet", 1),
    _with_folder("ssd_mobilenet_v1_coco_quantized", "SSD MobileNet", 1),
    _with_folder("tts_float", "Text to speech", SEQUENCE_COUNT, "mel-cep-log-f0"),
    _with_folder("asr_float", "Speech recognition", SEQUENCE_COUNT, "phone-error-rate"),
)
"""MLTS's tests, in the order of its list."""
