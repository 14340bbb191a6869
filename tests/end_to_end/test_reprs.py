"""Short descriptions of a client's objects: what they show, also once they are closed."""

from __future__ import annotations

import numpy as np
import pytest

import nnfmq

DIGITS = nnfmq.example_path("digits.tflite")
SIGNATURE = "'image' (float32 1x8x8x1) → 'probabilities' (float32 1x10)"


def test_a_client_shows_its_driver_and_interface(client: nnfmq.Client) -> None:
    assert repr(client) == f"<Client of driver {client.driver_pid}, AIDL v4>"
    client.close()
    assert repr(client).endswith(", closed>")


def test_a_device_shows_what_it_is(device: nnfmq.Device) -> None:
    version, level = device.info.version, device.info.feature_level
    shown = f"'reference': CPU, AVAILABLE, {version!r}, feature level {level}, 1 extension"
    assert (repr(device), repr(device.info)) == (f"<Device {shown}>", f"<DeviceInfo {shown}>")


def test_a_prepared_model_and_its_burst_show_shapes_and_dtypes(device: nnfmq.Device) -> None:
    model = device.prepare(DIGITS)
    burst, requests, execution = model.burst(), model.request_burst(), model.create_reusable_execution()
    assert repr(model) == f"<PreparedModel on 'reference': {SIGNATURE}>"
    assert repr(burst) == f"<Burst on 'reference': {SIGNATURE}>"
    assert repr(requests) == f"<Burst on 'reference', without memory: {SIGNATURE}>"
    assert repr(execution) == f"<Execution, reusable: {SIGNATURE}>"
    for owner in (requests, execution, burst, model):
        owner.close()
    assert repr(model) == f"<PreparedModel on 'reference', closed: {SIGNATURE}>"
    assert repr(burst) == f"<Burst on 'reference', closed: {SIGNATURE}>"
    assert repr(execution) == "<Execution, reusable: closed>"


def test_showing_a_burst_does_not_count_as_giving_it_inputs(device: nnfmq.Device) -> None:
    with device.prepare(DIGITS) as model, model.burst() as burst:
        repr(burst)
        with pytest.raises(nnfmq.InvalidArgument, match="never written"):
            burst.execute()


def test_a_notebook_shows_a_table_of_a_prepared_model(device: nnfmq.Device) -> None:
    with device.prepare(DIGITS) as model:
        html = model._repr_html_()
    assert "<td>image</td><td>float32</td><td>1x8x8x1</td>" in html


def test_a_buffer_and_a_memory_show_their_size(device: nnfmq.Device) -> None:
    with device.prepare(DIGITS) as model, device.allocate(inputs=[(model, 0)]) as buffer:
        buffer.copy_from(np.zeros((1, 8, 8, 1), np.float32))
        assert repr(buffer) == f"<Buffer: float32 1x8x8x1, in the driver, token {buffer.token}>"
    with nnfmq.Memory.create(4096) as memory:
        assert repr(memory) == "<Memory: 4096 bytes>"
    assert repr(memory) == "<Memory: 4096 bytes, closed>"
