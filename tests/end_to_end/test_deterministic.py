"""`deterministic`: floats with the same bits on another instruction set, or a preparation that fails.

A driver that generates code for SSE4.1 stands for another machine: its multiply-adds round twice by default.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import running_daemon
from support.fake_repository import serving
from support.model_folders import RepositoryPeer, add_version
from support.small_models import one_operation
from support.tflite_files import Tensor, single

import nnfmq
from nnfmq.engines.compiled.target import host_target
from nnfmq.hal.deterministic import DETERMINISTIC
from nnfmq.hal.extensions import extension_code
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.types import ExtensionNameAndPrefix, Model, Operand, OperandType, OperationType, TokenValuePair
from nnfmq.serialize.repository_protocol import ModelState

pytest.importorskip("llvmlite", exc_type=ImportError)

F32 = OperandType.TENSOR_FLOAT32
RANDOM = np.random.default_rng(0)
INPUT = RANDOM.normal(size=(3, 300)).astype(np.float32)


def product() -> Model:
    arrays = RANDOM.normal(size=(40, 300)).astype(np.float32), RANDOM.normal(size=40).astype(np.float32)
    weights, bias = ((Operand(F32, array.shape), array.tobytes()) for array in arrays)
    return one_operation(
        OperationType.FULLY_CONNECTED, [Operand(F32, INPUT.shape), weights, bias, 0], Operand(F32, (3, 40))
    )


def sine() -> Model:
    return one_operation(OperationType.SIN, [Operand(F32, INPUT.shape)], Operand(F32, INPUT.shape))


@pytest.fixture
def client(folder: Path) -> Iterator[nnfmq.Client]:
    with running_daemon(folder / "d.sock") as daemon, daemon.connect() as connected:
        yield connected


def bits(client: nnfmq.Client, model: Model, deterministic: bool) -> bytes:
    with client.device("compiled").prepare(model, deterministic=deterministic) as prepared:
        return prepared.execute(INPUT)[0].tobytes()


@pytest.mark.skipif(platform.machine() != "x86_64" or not host_target().has_fma, reason="needs FMA on x86-64")
def test_floats_have_the_bits_of_a_machine_without_multiply_adds(client: nnfmq.Client, folder: Path) -> None:
    model = product()
    here = bits(client, model, deterministic=False)
    assert bits(client, model, deterministic=True) == here  # FMA rounds once by itself
    slower = running_daemon(folder / "sse.sock", environment={"NNFMQ_TARGET": "sse4.1"})
    with slower as daemon, daemon.connect() as other:
        assert bits(other, model, deterministic=True) == here
        assert bits(other, model, deterministic=False) != here  # nor are they in the cache of the other program
        assert bits(other, model, deterministic=True) == here


def test_an_operation_of_the_c_library_is_refused_and_not_left_to_another_device(client: nnfmq.Client) -> None:
    bits(client, sine(), deterministic=False)  # a program is in the cache
    for prepare in (client.device("compiled").prepare, client.prepare):
        with pytest.raises(nnfmq.GeneralFailure, match=r"operation 0 \(SIN\).*C library computes it.*deterministic"):
            prepare(sine(), deterministic=True)


def test_another_device_refuses(client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"'reference' does not promise the same bits.*use the device comp"):
        client.device("reference").prepare(product(), deterministic=True)


def test_bits_do_not_change_while_the_model_is_in_use(client: nnfmq.Client) -> None:
    device = client.device("compiled")
    with device.prepare(product(), preference="fast_single_answer", deterministic=True) as prepared:
        assert prepared.program is ProgramKind.COMPILED


def test_a_served_model_that_cannot_have_the_same_bits_is_broken(folder: Path) -> None:
    models = folder / "models"
    for name, options in ("asked", "deterministic = true"), ("not-asked", ""):
        add_version(models, name, 1, single("SIN", [Tensor("x", (4,)), Tensor("y", (4,))]), options=options)
    with running_daemon(folder / "d.sock", models=models) as daemon, RepositoryPeer(daemon.path) as peer:
        peer.wait_for("not-asked", state=ModelState.READY)
        peer.wait_for("asked", state=ModelState.UNAVAILABLE, failed_version=1)
        assert "operation 0 (SIN)" in peer.open("asked").message


def test_a_client_prepares_a_served_model_as_the_repository_says(folder: Path) -> None:
    with running_daemon(folder / "d.sock") as daemon, serving(daemon) as repository, daemon.connect() as client:
        repository.publish("sine", 1, sine(), device="compiled", deterministic=True)
        with pytest.raises(nnfmq.GeneralFailure, match=r"operation 0 \(SIN\).*deterministic"):
            client.model("sine")


def test_the_hint_has_one_value(client: nnfmq.Client) -> None:
    hints = {"extensions": [ExtensionNameAndPrefix(DETERMINISTIC, 3)]}
    device, token = client.device("compiled"), extension_code(3, 0)
    with pytest.raises(nnfmq.GeneralFailure, match="SIN"):
        device.prepare(sine(), hints=[TokenValuePair(token, b"\x01")], **hints)
    with pytest.raises(nnfmq.InvalidArgument, match="allowed is"):
        device.prepare(sine(), hints=[TokenValuePair(token, b"\x00")], **hints)
