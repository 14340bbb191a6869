# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core of the digests: SHA-256 with the CPU's instructions for it. `_pysha256.py` has the docstrings.

A process with this core does not load OpenSSL, which takes 2 MiB of each. Both compute as fast.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef extern from "_sha256.h" nogil:
    enum:
        SHA256_BLOCK_BYTES
    bint sha256_is_supported()
    void sha256_add_blocks(uint32_t *state, const uint8_t *data, size_t count)

cdef enum:
    LENGTH_BYTES = 8  # at the end of the padding
    LARGE_BYTES = 2048  # hashed while other threads run

cdef uint32_t[8] INITIAL = [
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
]  # FIPS 180-4, 5.3.3


def is_supported():
    return sha256_is_supported()


@cython.final
cdef class Sha256:
    cdef uint32_t[8] state
    cdef uint8_t[128] tail  # bytes that do not fill a block yet; in `digest` with the padding, which may take one more
    cdef uint64_t size  # of all bytes

    def __cinit__(self, data=b"", /):
        if not sha256_is_supported():
            raise RuntimeError("this CPU has no instructions for SHA-256")
        memcpy(self.state, INITIAL, sizeof(INITIAL))
        self.update(data)

    def update(self, data, /):
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if view.len < LARGE_BYTES:
                self.add(<const uint8_t *>view.buf, view.len)
            else:
                with nogil:
                    self.add(<const uint8_t *>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef void add(self, const uint8_t *data, size_t size) noexcept nogil:
        cdef size_t kept = self.size % SHA256_BLOCK_BYTES
        cdef size_t taken, blocks
        self.size += size
        if kept:
            taken = min(size, SHA256_BLOCK_BYTES - kept)
            memcpy(self.tail + kept, data, taken)
            data += taken
            size -= taken
            if kept + taken < SHA256_BLOCK_BYTES:
                return
            sha256_add_blocks(self.state, self.tail, 1)
        blocks = size // SHA256_BLOCK_BYTES
        sha256_add_blocks(self.state, data, blocks)
        memcpy(self.tail, data + blocks * SHA256_BLOCK_BYTES, size % SHA256_BLOCK_BYTES)

    def digest(self):
        cdef uint32_t[8] state
        cdef uint8_t[128] tail
        cdef uint8_t[32] result
        cdef size_t kept = self.size % SHA256_BLOCK_BYTES
        cdef size_t end = SHA256_BLOCK_BYTES if kept + 1 + LENGTH_BYTES <= SHA256_BLOCK_BYTES else 2 * SHA256_BLOCK_BYTES
        cdef size_t index
        memcpy(state, self.state, sizeof(state))
        memset(tail, 0, sizeof(tail))
        memcpy(tail, self.tail, kept)
        tail[kept] = 0x80
        for index in range(LENGTH_BYTES):
            tail[end - 1 - index] = <uint8_t>((8 * self.size) >> (8 * index))
        sha256_add_blocks(state, tail, end // SHA256_BLOCK_BYTES)
        for index in range(32):
            result[index] = <uint8_t>(state[index // 4] >> (24 - 8 * (index % 4)))
        return (<char *>result)[:32]
