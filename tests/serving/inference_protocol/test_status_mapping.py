"""The status of each error, against the table of the documentation, and of errors that come through Ray."""

from __future__ import annotations

import logging
import re
from importlib import metadata
from pathlib import Path

import pytest
from support.places import ROOT

from nnfmq import hal
from nnfmq.hal import errors
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    ModelNotFound,
    OutputInsufficientSize,
    ProtocolError,
    QueueCorrupted,
    UnsupportedModel,
)
from nnfmq.serving.inference_protocol.errors import MAPPING, RAY_MAPPING, ProtocolStatus, error_text, protocol_status

INTERNAL = ProtocolStatus(500, "INTERNAL")
ROW = re.compile(
    r"^\| `(?P<name>[\w.]+)` \| (?P<http>\d{3}) \| (?P<grpc>[A-Z_]+) \| (?P<retry>-|\d+) \|$", re.MULTILINE
)


def documented() -> dict[str, ProtocolStatus]:
    page = (ROOT / "docs" / "reference" / "inference-protocol.md").read_text(encoding="utf-8")
    return {
        row["name"]: ProtocolStatus(int(row["http"]), row["grpc"], None if row["retry"] == "-" else int(row["retry"]))
        for row in ROW.finditer(page)
    }


def test_the_documentation_has_the_table() -> None:
    assert documented() == {**{kind.__name__: status for kind, status in MAPPING.items()}, **RAY_MAPPING}


def test_every_code_is_one_of_grpc() -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    for status in (*MAPPING.values(), *RAY_MAPPING.values()):
        assert grpc.StatusCode[status.grpc]


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name not in ("ErrorStatus", "ModelProblem")])
def test_every_error_of_nnfmq_has_the_status_of_its_nearest_class(name: str) -> None:
    kind = getattr(hal.errors, name)
    nearest = next(base for base in kind.__mro__ if base in MAPPING)
    assert protocol_status(kind("text")) == MAPPING[nearest]


@pytest.mark.parametrize(
    ("error", "http"),
    [
        (MissedDeadlineTransient("late"), 504),
        (MissedDeadlinePersistent("late"), 504),
        (TimeoutError("late"), 504),
        (OutputInsufficientSize("small"), 500),
        (GeneralFailure("failed"), 500),
        (ProtocolError("bytes"), 500),
        (QueueCorrupted("counters"), 500),
        (UnsupportedModel("operator"), 400),
        (ModelNotFound("gone"), 404),
        (ZeroDivisionError("defect"), 500),
    ],
)
def test_errors_have_the_status_of_a_base_class(error: Exception, http: int) -> None:
    assert protocol_status(error).http == http


def test_the_text_of_a_defect_is_logged_and_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    error = ZeroDivisionError("a secret")
    with caplog.at_level(logging.ERROR, "nnfmq.serving"):
        assert error_text(error) == "internal error: ZeroDivisionError; the server's log has details"
    assert "a secret" in caplog.text


def test_the_text_of_an_error_is_sent_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert error_text(InvalidArgument("input 'x' is missing")) == "input 'x' is missing"
    assert error_text(GeneralFailure("failed")) == "failed"
    assert error_text(InvalidArgument("")) == "InvalidArgument"
    assert len(error_text(InvalidArgument("x" * 100_000))) == 1000
    assert not caplog.records


# ------------------------------------------------------------------------------------------------ Ray


@pytest.mark.parametrize("name", sorted(RAY_MAPPING))
def test_rays_errors_have_these_names(name: str) -> None:
    """Read Ray's source: importing it sets variables of the environment."""
    try:
        ray = metadata.distribution("ray")
    except metadata.PackageNotFoundError:
        pytest.skip("Ray is not installed")
    module, _, kind = name.rpartition(".")
    source = Path(str(ray.locate_file(module.replace(".", "/") + ".py"))).read_text(encoding="utf-8")
    assert re.search(rf"^class {kind}\(", source, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(RAY_MAPPING))
def test_rays_errors_and_those_derived_from_them_have_a_status(name: str) -> None:
    module, _, kind = name.rpartition(".")
    base = type(kind, (Exception,), {"__module__": module})
    for found in (base, type("Derived", (base,), {})):
        assert protocol_status(found("text")) == RAY_MAPPING[name]


def of_ray(name: str, base: type[Exception] = Exception) -> type[Exception]:
    """Return a class that Ray would have."""
    return type(name, (base,), {"__module__": "ray.exceptions", "__qualname__": name})


def test_an_error_of_a_replica_has_the_status_and_the_text_of_its_cause() -> None:
    task_error = of_ray("RayTaskError")
    as_cause = type("RayTaskError(ModelNotFound)", (task_error, ModelNotFound), {})
    for kind in (task_error, as_cause):
        error = kind("a traceback")
        error.cause = ModelNotFound("there is no model 'a'")  # type: ignore[attr-defined]
        assert protocol_status(error).http == 404
        assert error_text(error) == "there is no model 'a'"


def test_the_cause_of_another_error_decides_nothing() -> None:
    error = of_ray("OtherError")("text")
    error.cause = ModelNotFound("gone")  # type: ignore[attr-defined]
    assert protocol_status(error) == INTERNAL
    without_cause = of_ray("RayTaskError")("a traceback")
    without_cause.cause = "text"  # type: ignore[attr-defined]
    assert protocol_status(without_cause) == INTERNAL
