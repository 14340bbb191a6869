"""Spectra: the Fourier transform of real rows, and parts of complex numbers.

A transform of N real numbers is one of N / 2 complex numbers, z[k] = x[2k] + i·x[2k + 1], whose results are combined.
It is computed in float64, as in the reference. Each lane has another row, so that no stage shuffles lanes: elements are
scattered in bit-reversed order while rows are transposed, then stages of radix 4 (and a first one of radix 2, if the
number of stages is odd) work in position. Products and sums are rounded one by one: all targets have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, F64, I64, KernelBuilder, Value, for_each_vector, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.engines.compiled.target import Target

__all__ = ["MIN_LENGTH", "ComplexPart", "RealFft"]

MIN_LENGTH = 4
"""The least length of a transform."""

_PAIR, _COMPLEX_BYTES, _ENTRY_BYTES = 8, 8, 16  # two float32; a result; a complex number of a table
_VECTORS = 2  # of a step of `ComplexPart`

_Complex: TypeAlias = tuple[Value, Value]
"""The real and the imaginary parts of as many numbers as there are lanes."""


@dataclass(frozen=True, slots=True)
class RealFft(Kernel):
    """The spectra of `rows` rows, `pitch` elements apart: `length` / 2 + 1 complex numbers of float32 each.

    The first `given` elements of a row are used, at most `length`, a power of two; then zeros follow. A work item is a
    group of as many rows as there are `lanes` of float64. The last group ends with the last row several times.
    """

    rows: int
    pitch: int
    given: int
    length: int
    lanes: int

    @property
    def _points(self) -> int:
        """Complex numbers of a transform."""
        return self.length // 2

    @property
    def _quarters(self) -> Sequence[int]:
        """Distances between the four numbers that each stage of radix 4 combines."""
        return [1 << n for n in range((self._points.bit_length() - 1) % 2, self._points.bit_length() - 1, 2)]

    @property
    def work_items(self) -> int:
        """Groups of rows."""
        return math.ceil(self.rows / self.lanes)

    def scratch_bytes(self, target: Target) -> int:
        """Return the size of a group's complex numbers."""
        return self._points * self._point_bytes

    @property
    def _point_bytes(self) -> int:
        return 2 * 8 * self.lanes

    # -- constants -----------------------------------------------------------------------------------------------------

    def positions(self) -> bytes:
        """Return the constant with the offset of each number in scratch memory: its position in bit-reversed order."""
        reversed_order = np.zeros(1, np.int64)
        while len(reversed_order) < self._points:
            reversed_order = np.concatenate([2 * reversed_order, 2 * reversed_order + 1])
        return (reversed_order * self._point_bytes).tobytes()

    def factors(self) -> bytes:
        """Return the constant with the powers of the stages' roots of unity, three for each butterfly of a stage."""
        stages = [_roots(4 * quarter, np.outer(np.arange(quarter), (2, 1, 3))) for quarter in self._quarters]
        return b"".join(stage.tobytes() for stage in stages)

    def last_factors(self) -> bytes:
        """Return the constant with the powers that combine the results, one for each number of a spectrum."""
        return _roots(self.length, np.arange(self._points + 1)).tobytes()

    # -- code ----------------------------------------------------------------------------------------------------------

    def emit(self, kb: KernelBuilder) -> None:
        """Args: rows, spectra, positions, factors, last factors."""
        source, out, positions, factors, last_factors = map(kb.argument, range(5))
        with kb.loop(kb.begin, kb.end) as work_item:
            first = kb.mul(work_item, self.lanes)
            group = [
                kb.intrinsic("llvm.smin", kb.add(first, lane), kb.i64(self.rows - 1)) for lane in range(self.lanes)
            ]
            self._emit_transposed(kb, [kb.at(source, kb.mul(row, 4 * self.pitch)) for row in group], positions)
            if self._quarters[:1] != [1]:
                self._emit_first_stage(kb)
            for quarter in self._quarters:
                # The stages before have factors for q₀ + 4·q₀ + ... = (quarter - q₀) / 3 butterflies.
                begun = (quarter - self._quarters[0]) // 3
                self._emit_stage(kb, quarter, kb.at(factors, begun * 3 * _ENTRY_BYTES))
            row_bytes = (self._points + 1) * _COMPLEX_BYTES
            self._emit_spectra(kb, [kb.at(out, kb.mul(row, row_bytes)) for row in group], last_factors)
        kb.return_void()

    def _emit_transposed(self, kb: KernelBuilder, rows: Sequence[Value], positions: Value) -> None:
        """Store pairs of each row's elements as complex numbers, and zeros after the last one."""

        def store(k: Value, pair: Sequence[Value]) -> None:
            position = kb.at(kb.scratch, kb.load(I64, positions, kb.mul(k, 8)))
            self._store(kb, (pair[0], pair[1]), position)

        kind, zero = vector(F64, self.lanes), kb.splat(F64, 0.0, self.lanes)

        def lanes_of(k: Value, offset: int) -> Value:
            joined = kb.splat(F32, 0.0, self.lanes)
            for lane, row in enumerate(rows):
                element = kb.load(F32, row, kb.add(kb.mul(k, _PAIR), offset))
                joined = kb.ir.insert_element(joined, element, kb.i64(lane))
            return kb.ir.fpext(joined, kind)

        pairs = self.given // 2
        with kb.loop(0, pairs) as k:
            store(k, [lanes_of(k, 0), lanes_of(k, 4)])
        if self.given % 2:
            store(kb.i64(pairs), [lanes_of(kb.i64(pairs), 0), zero])
        with kb.loop(math.ceil(self.given / 2), self._points) as k:
            store(k, [zero, zero])

    def _emit_first_stage(self, kb: KernelBuilder) -> None:
        """Emit the stage of radix 2, whose factors are 1."""
        with kb.loop(0, self._points, 2) as first:
            positions = [kb.at(kb.scratch, kb.mul(kb.add(first, n), self._point_bytes)) for n in range(2)]
            a, b = (self._load(kb, position) for position in positions)
            self._store(kb, _sum(kb, a, b), positions[0])
            self._store(kb, _difference(kb, a, b), positions[1])

    def _emit_stage(self, kb: KernelBuilder, quarter: int, factors: Value) -> None:
        """Emit a stage of radix 4: blocks of four quarters, of which each butterfly combines one number."""
        with kb.loop(0, self._points, 4 * quarter) as block, kb.loop(0, quarter) as j:
            first = kb.at(kb.scratch, kb.mul(kb.add(block, j), self._point_bytes))
            positions = [kb.at(first, n * quarter * self._point_bytes) for n in range(4)]
            a, *others = (self._load(kb, position) for position in positions)
            if quarter > 1:
                butterfly = kb.at(factors, kb.mul(j, 3 * _ENTRY_BYTES))
                others = [
                    _product(kb, number, self._factor(kb, butterfly, n * _ENTRY_BYTES))
                    for n, number in enumerate(others)
                ]
            b, c, d = others
            even, odd = (_sum(kb, a, b), _difference(kb, a, b)), (_sum(kb, c, d), _difference(kb, c, d))
            clockwise = odd[1][1], kb.ir.fneg(odd[1][0])  # times -i
            self._store(kb, _sum(kb, even[0], odd[0]), positions[0])
            self._store(kb, _sum(kb, even[1], clockwise), positions[1])
            self._store(kb, _difference(kb, even[0], odd[0]), positions[2])
            self._store(kb, _difference(kb, even[1], clockwise), positions[3])

    def _emit_spectra(self, kb: KernelBuilder, outs: Sequence[Value], factors: Value) -> None:
        """Emit X[k] = (Z[k] + Z*[-k]) / 2 - i·root^k · (Z[k] - Z*[-k]) / 2 for all rows."""
        half, last = kb.splat(F64, 0.5, self.lanes), kb.i64(self._points - 1)
        with kb.loop(0, self._points + 1) as k:
            index, mirrored = kb.ir.and_(k, last), kb.ir.and_(kb.ir.sub(kb.i64(self._points), k), last)
            z, (real, imaginary) = (
                self._load(kb, kb.at(kb.scratch, kb.mul(n, self._point_bytes))) for n in (index, mirrored)
            )
            conjugate = real, kb.ir.fneg(imaginary)
            odd = _product(kb, _difference(kb, z, conjugate), self._factor(kb, factors, kb.mul(k, _ENTRY_BYTES)))
            twice = _sum(kb, _sum(kb, z, conjugate), (odd[1], kb.ir.fneg(odd[0])))
            real, imaginary = (kb.ir.fptrunc(kb.ir.fmul(part, half), vector(F32, self.lanes)) for part in twice)
            joined = kb.shuffle(real, imaginary, [lane for n in range(self.lanes) for lane in (n, self.lanes + n)])
            results = kb.ir.bitcast(joined, vector(I64, self.lanes))
            for lane, out in enumerate(outs):
                kb.store(kb.ir.extract_element(results, kb.i64(lane)), out, kb.mul(k, _COMPLEX_BYTES))

    def _load(self, kb: KernelBuilder, position: Value) -> _Complex:
        kind = vector(F64, self.lanes)
        return kb.load(kind, position), kb.load(kind, position, 8 * self.lanes)

    def _store(self, kb: KernelBuilder, number: _Complex, position: Value) -> None:
        for offset, part in zip((0, 8 * self.lanes), number, strict=True):
            kb.store(part, position, offset)

    def _factor(self, kb: KernelBuilder, table: Value, offset: Value | int) -> _Complex:
        entry = kb.at(table, offset)
        real, imaginary = (kb.broadcast(kb.load(F64, entry, n), self.lanes) for n in (0, 8))
        return real, imaginary


def _roots(count: int, powers: npt.NDArray[Any]) -> npt.NDArray[np.complex128]:
    """Return powers of the first root of unity of `count`, clockwise. Those on an axis are exact."""
    quadrants, within = np.divmod(4 * np.asarray(powers % count), count)
    angles = within * (np.pi / 2 / count)
    exact = np.array([1, -1j, -1, 1j])[quadrants]
    result: npt.NDArray[np.complex128] = exact * (np.cos(angles) - 1j * np.sin(angles))
    return result


def _sum(kb: KernelBuilder, a: _Complex, b: _Complex) -> _Complex:
    return kb.ir.fadd(a[0], b[0]), kb.ir.fadd(a[1], b[1])


def _difference(kb: KernelBuilder, a: _Complex, b: _Complex) -> _Complex:
    return kb.ir.fsub(a[0], b[0]), kb.ir.fsub(a[1], b[1])


def _product(kb: KernelBuilder, a: _Complex, b: _Complex) -> _Complex:
    (ar, ai), (br, bi) = a, b
    real = kb.ir.fsub(kb.ir.fmul(ar, br), kb.ir.fmul(ai, bi))
    return real, kb.ir.fadd(kb.ir.fmul(ar, bi), kb.ir.fmul(ai, br))


# -- parts of complex numbers ------------------------------------------------------------------------------------------

Part: TypeAlias = Literal["real", "imaginary", "absolute"]


@dataclass(frozen=True, slots=True)
class ComplexPart(Kernel):
    """The real or imaginary parts of complex numbers, or their absolute values. A work item is a chunk of them."""

    part: Part
    count: int
    chunk: int

    @property
    def work_items(self) -> int:
        """Chunks of numbers."""
        return math.ceil(self.count / self.chunk)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: complex numbers, parts. The last chunk starts early, so that all have one length."""
        source, out = map(kb.argument, range(2))
        length = min(self.chunk, self.count)
        with kb.loop(kb.begin, kb.end) as work_item:
            first = kb.intrinsic("llvm.smin", kb.mul(work_item, self.chunk), kb.i64(self.count - length))
            numbers, parts = kb.at(source, kb.mul(first, _COMPLEX_BYTES)), kb.at(out, kb.mul(first, 4))

            def emit_vector(offset: Any, lanes: int, numbers: Value = numbers, parts: Value = parts) -> None:
                loaded = kb.load(vector(F32, 2 * lanes), numbers, kb.mul(offset, _COMPLEX_BYTES))
                real, imaginary = (kb.shuffle(loaded, loaded, range(n, 2 * lanes, 2)) for n in (0, 1))
                kb.store(self._of(kb, real, imaginary), parts, kb.mul(offset, 4))

            for_each_vector(kb, length, _VECTORS * kb.target.lanes, emit_vector)
        kb.return_void()

    def _of(self, kb: KernelBuilder, real: Value, imaginary: Value) -> Value:
        """Return the parts. An absolute value is computed in float64; it is infinite if a part is, beside NaN, too."""
        if self.part != "absolute":
            return real if self.part == "real" else imaginary
        lanes, wide = real.type.count, vector(F64, real.type.count)
        r, i = kb.ir.fpext(real, wide), kb.ir.fpext(imaginary, wide)
        squares = kb.ir.fadd(kb.ir.fmul(r, r), kb.ir.fmul(i, i))
        result = kb.ir.fptrunc(kb.intrinsic("llvm.sqrt", squares), real.type)
        infinity = kb.splat(F32, math.inf, lanes)
        is_infinite = [
            kb.ir.fcmp_ordered("==", kb.intrinsic("llvm.fabs", part), infinity) for part in (real, imaginary)
        ]
        return kb.ir.select(kb.ir.or_(*is_infinite), infinity, result)
