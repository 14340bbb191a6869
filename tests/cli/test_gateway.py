"""`nnfmq gateway` as a process, with Triton's clients: models, metrics, tokens and TLS, and its driver's end."""

from __future__ import annotations

import argparse
import json
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.certificates import self_signed
from support.commands import started
from support.drivers import opened, running_daemon, short_folder, until
from support.model_folders import RepositoryPeer, add_version, adder

from nnfmq.cli import main
from nnfmq.cli.gateway import Address, address
from nnfmq.serialize.repository_protocol import ModelState

pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
rpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

TOKEN = "0123456789abcdef0123456789abcdef"
ANYWHERE = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")


@contextmanager
def serving_adder(folder: Path) -> Iterator[Any]:
    """Run a driver that serves the model `adder`, which adds 1."""
    if not (folder / "models").exists():
        add_version(folder / "models", "adder", 1, adder(1))
    with running_daemon(folder / "d.sock", models=folder / "models") as daemon:
        with RepositoryPeer(folder / "d.sock") as peer:
            peer.wait_for("adder", state=ModelState.READY)
        yield daemon


@pytest.fixture(scope="module")
def driver() -> Iterator[Path]:
    """Return the socket of a driver that serves `adder`."""
    with short_folder() as made, serving_adder(made):
        yield made / "d.sock"


def lines(process: subprocess.Popen[bytes]) -> tuple[str, str, str]:
    """Return the address of HTTP, that of gRPC, and the models: what a gateway prints when clients can connect."""
    assert process.stdout is not None
    printed = [process.stdout.readline().decode().strip() for _ in range(3)]
    for prefix, each in zip(("nnfmq: HTTP at ", "nnfmq: gRPC at ", "nnfmq: "), printed, strict=True):
        assert each.startswith(prefix), printed
    return printed[0].split()[3], printed[1].split()[3], printed[2].removeprefix("nnfmq: serving ")


def read(url: str, **options: Any) -> Any:
    with urllib.request.urlopen(url, timeout=60, **options) as reply:
        return reply.read().decode()


def infer(client: Any, **options: Any) -> list[float]:
    (tensor,) = client.get_model_metadata("adder", **options).inputs
    given = rpc.InferInput(tensor.name, tensor.shape, tensor.datatype)
    given.set_data_from_numpy(np.zeros(tensor.shape, np.float32))
    result = client.infer("adder", [given], **options)
    found: list[float] = result.as_numpy(result.get_response().outputs[0].name).ravel().tolist()
    return found


def executions(metrics: str) -> float:
    """Return how often all clients have executed `adder`."""
    families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families(metrics)
    samples = [each for family in families for each in family.samples if each.name == "nnfmq_executions_total"]
    return sum(each.value for each in samples if each.labels["model"] == "adder")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_models_and_metrics_until_a_signal(driver: Path, number: signal.Signals) -> None:
    with started("gateway", "--connect", str(driver), *ANYWHERE) as process:
        url, grpc_address, models = lines(process)
        assert models == "adder"
        with rpc.InferenceServerClient(grpc_address) as client:
            before = executions(read(f"{url}/metrics"))
            assert infer(client) == [1, 1, 1, 1]
        (row,) = json.loads(read(f"{url}/v2/models/adder/stats"))["model_stats"]
        assert row["inference_stats"]["success"]["count"] == 1
        metrics = read(f"{url}/metrics")
        assert executions(metrics) == before + 1
        assert 'nnfmq_gateway_requests_total{model="adder",result="success",version="1"} 1.0' in metrics
        process.send_signal(number)
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 0


def test_it_outlives_its_driver(folder: Path) -> None:
    with serving_adder(folder) as daemon, started("gateway", "--connect", str(folder / "d.sock"), *ANYWHERE) as process:
        url, grpc_address, _ = lines(process)
        client = rpc.InferenceServerClient(grpc_address)
        assert infer(client) == [1, 1, 1, 1]
        with ExitStack() as stack:
            workers = [stack.enter_context(worker) for worker in opened(daemon.process.descendants())]
            daemon.kill()
            for worker in workers:
                worker.kill()
        until(lambda: not client.is_server_ready(), "the gateway knows")
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            read(f"{url}/v2/health/ready")
        raised.value.close()
        with serving_adder(folder):
            until(client.is_server_ready, "the gateway has connected again")
            assert infer(client) == [1, 1, 1, 1]
            client.close()
            process.terminate()


def test_it_may_start_before_its_driver(folder: Path) -> None:
    with started("gateway", "--connect", str(folder / "d.sock"), *ANYWHERE) as process:
        url, grpc_address, line = lines(process)
        assert line.startswith("nnfmq: requests are refused until a driver listens: no driver listens at")
        with rpc.InferenceServerClient(grpc_address) as client:
            assert client.is_server_live() and not client.is_server_ready()
            with pytest.raises(rpc.InferenceServerException, match="no driver listens") as refused:
                client.infer("adder", [])
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
            for path in ("health/ready", "models/adder"):
                with pytest.raises(urllib.error.HTTPError, match="503") as raised:
                    read(f"{url}/v2/{path}")
                raised.value.close()
            with serving_adder(folder):
                until(client.is_server_ready, "the gateway has connected")
                assert infer(client) == [1, 1, 1, 1]
                process.terminate()
                assert process.wait(60) == 0


def test_a_gateway_ends_while_it_has_no_driver(folder: Path) -> None:
    with started("gateway", "--connect", str(folder / "d.sock"), *ANYWHERE) as process:
        lines(process)
        process.terminate()
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 0


def test_with_tokens_and_a_certificate_it_needs_both(driver: Path, folder: Path) -> None:
    certificate, key = self_signed(folder)
    (folder / "tokens").write_text(TOKEN, encoding="utf-8")
    secrets = ("--token-file", str(folder / "tokens"), "--tls-certificate", str(certificate), "--tls-key", str(key))
    with started("gateway", "--connect", str(driver), *ANYWHERE, *secrets) as process:
        url, grpc_address, _ = lines(process)
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        assert read(f"{url}/v2/health/ready", context=context) == '{"ready":true}'
        with pytest.raises(urllib.error.HTTPError, match="401") as raised:
            read(f"{url}/metrics", context=context)
        raised.value.close()
        with rpc.InferenceServerClient(grpc_address, ssl=True, root_certificates=str(certificate)) as client:
            assert infer(client, headers={"authorization": f"Bearer {TOKEN}"}) == [1, 1, 1, 1]
        process.terminate()
    assert process.returncode == 0


def test_an_address_that_others_reach_without_token_and_certificate_is_warned_of(driver: Path) -> None:
    everywhere = ("--http", "0.0.0.0:0", "--grpc", "none")
    with started("gateway", "--connect", str(driver), *everywhere) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"nnfmq: HTTP at http://0.0.0.0:")
        process.terminate()
        errors = process.communicate(timeout=60)[1].decode()
    assert errors == (
        "nnfmq: warning: 0.0.0.0:0 has no --token-file: anybody can use the models; no --tls-certificate: anybody can "
        "read along\n"
    )


@pytest.mark.usefixtures("configured_logs")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--tls-key", "server.key"), 2, "--tls-certificate and --tls-key belong together"),
        (("--http", "none", "--grpc", "none"), 2, "nothing is left to serve"),
        (("--token-file", "none/tokens"), 1, "none/tokens: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, words: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", "--connect", str(folder / "d.sock"), *words]) == status
    error = capsys.readouterr().err
    assert error.startswith("nnfmq: error: ") and message in error and error.count("\n") == 1


def test_an_address_is_a_host_and_a_port_or_none() -> None:
    assert address("none") is None
    assert address("[::1]:80") == Address("::1", 80)
    assert [Address(host, 1).is_loopback for host in ("localhost", "127.0.0.3", "::1", "0.0.0.0", "example.org")] == [
        True, True, True, False, False
    ]  # fmt: skip
    for text in ("8000", ":8000", "host:", "host:65536", "host:-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"neither HOST:PORT, such as 127\.0\.0\.1:8000, nor none"):
            address(text)
