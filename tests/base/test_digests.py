"""Digests by each implementation, compared with the standard library's and with FIPS 180-4."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nnfmq.base import digests
from nnfmq.base._pysha256 import Sha256

CONTENT = np.random.default_rng(5).bytes(1 << 20)
IMPLEMENTATIONS = {digests.Sha256, Sha256}
OPENSSL = """
import sys
from nnfmq.base import digests
print(digests.sha256(b"abc").hex(), "_hashlib" in sys.modules)
"""


@pytest.fixture(params=sorted(IMPLEMENTATIONS, key=lambda each: each.__module__), ids=lambda each: each.__module__)
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_has_the_digest_of_the_standard(implementation: Any) -> None:
    # The example of two blocks in "Examples with intermediate values" of FIPS 180.
    message = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"
    expected = "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    assert implementation(message).digest().hex() == expected


def test_every_length_of_the_last_block_is_padded(implementation: Any) -> None:
    for size in (*range(200), 2047, 2048, 2049, 1 << 20):
        data = CONTENT[:size]
        assert implementation(data).digest() == hashlib.sha256(data).digest(), size


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 63, 64), (63, 1, 1), (65, 62, 1), (10, 20, 30), (3, 4096, 5)])
def test_parts_are_one_message(implementation: Any, sizes: tuple[int, ...]) -> None:
    digest, begin = implementation(), 0
    for size in sizes:
        digest.update(CONTENT[begin : begin + size])
        begin += size
        assert digest.digest() == hashlib.sha256(CONTENT[:begin]).digest()


def test_all_that_has_contiguous_bytes_is_taken(implementation: Any) -> None:
    numbers = np.arange(24, dtype=np.int16)
    for data in (bytearray(CONTENT[:99]), memoryview(CONTENT)[1:100], numbers.data, numbers.reshape(2, 12).data):
        assert implementation(data).digest() == hashlib.sha256(data).digest()
    for other in ("text", 5, None):
        with pytest.raises(TypeError):
            implementation(other)
    with pytest.raises(BufferError):
        implementation(numbers[::2].data)


def test_threads_compute_digests_of_the_same_bytes_at_the_same_time(implementation: Any) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: implementation(CONTENT).digest(), range(8)))
    assert set(found) == {hashlib.sha256(CONTENT).digest()}


@pytest.mark.parametrize("key", [b"", b"k", CONTENT[:32], CONTENT[:64]], ids=len)
def test_an_HMAC_is_that_of_the_standard_library(key: bytes) -> None:
    parts = (CONTENT[:100], b"", CONTENT[100:5000])
    assert digests.hmac_sha256(key, *parts) == hmac.new(key, b"".join(parts), "sha256").digest()


def test_digests_are_equal_if_no_bit_differs() -> None:
    digest = digests.sha256(CONTENT)
    assert digests.are_equal(digest, bytes(bytearray(digest)))
    for bit in range(8 * digests.DIGEST_BYTES):
        other = (int.from_bytes(digest) ^ 1 << bit).to_bytes(digests.DIGEST_BYTES)
        assert not digests.are_equal(digest, other)


@pytest.mark.skipif(not digests.is_compiled, reason="OpenSSL computes the digests here")
@pytest.mark.parametrize(("core", "has_openssl"), [("compiled", False), ("python", True)])
def test_OpenSSL_is_loaded_only_by_the_Python_core(
    core: str, has_openssl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_CORE", core)
    output = subprocess.run([sys.executable, "-c", OPENSSL], capture_output=True, text=True, check=True).stdout
    assert output.split() == [hashlib.sha256(b"abc").hexdigest(), str(has_openssl)]
