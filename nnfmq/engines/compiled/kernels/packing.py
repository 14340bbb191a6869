"""Packing: inputs (LHS) and weights (RHS) in the order and the element type in which micro-kernels read them.

**LHS.** Input rows are converted to the micro-kernel's element type, in per-thread scratch, with padding. An
`InputRowBuffer` holds the input rows that a block of output rows reads. Rows are never read past their last byte,
because an input may end at the end of a mapping. Shapes are run-time values, so all images share the code.

**RHS at run time.** `PackRhs` packs matrices that are operands, as `GemmKernel.pack` packs weights.

**RHS for acc16** (u8 * s8 products summed in int16, without saturation). A K group is 8 inputs x0..x7. Two pmaddubsw
and a paddw leave x0*w0 + x1*w1 + x4*w4 + x5*w5 in one int16 lane and the products 2, 3, 6, 7 in the next; pmaddwd by
ones widens to int32. As x <= 255, a lane cannot overflow while the weights of either sign in its four sum to at most
128 in magnitude: every partial sum is between -255 * 128 and 255 * 128 = 32640. Groups that break the bound are split
into terms that keep it, and are listed once per term; all-zero groups are dropped. Run time therefore depends on the
weights. Compare FBGEMM's outlier-aware acc16 kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.ir_builder import F32, I8, I16, I32, Constant, Index, KernelBuilder, Value, vector
from nnfmq.engines.compiled.kernels import Kernel
from nnfmq.operations.shapes import WindowDimension

__all__ = [
    "ACC16_KR",
    "GROUP_LIST_ALIGNMENT",
    "OVERREAD_BYTES",
    "InputConverter",
    "InputRowBuffer",
    "PackRhs",
    "PackRhsBytes",
    "RowBufferParams",
    "fill_row_buffer",
    "group_list_length",
    "pack_group_lists",
    "pack_lhs_row",
    "pack_lhs_row_repeated",
    "split_for_acc16",
]

OVERREAD_BYTES = 64
"""Scratch bytes after packed rows: the last K group may read them, the last vector of padding may write them."""

# -- LHS ---------------------------------------------------------------------------------------------------------------


class InputConverter(Protocol):
    """Converts input elements to LHS elements: a micro-kernel's, for input of one dtype and zero point."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an input element."""
        ...

    @property
    def lhs_bytes(self) -> int:
        """Bytes of an LHS element."""
        ...

    def convert(self, kb: KernelBuilder, source: Value, offset: Any, count: int) -> Value:
        """Load `count` input elements and return them as LHS elements."""
        ...

    def padding(self, kb: KernelBuilder, count: int) -> Value:
        """Return `count` LHS elements that represent 0."""
        ...


class RowBufferParams(NamedTuple):
    """The extents of an `InputRowBuffer`, as integers or as loaded values. Elements are LHS elements."""

    height: Any
    row_stride: Any  # input rows from one output row to the next
    padding_top: Any
    kernel_rows: Any  # buffered rows under an output row
    row_step: Any  # input rows from one buffered row to the next
    input_row_bytes: Any
    pitch: Any  # bytes from one buffered row to the next
    left: Any  # elements of padding before a row
    within: Any  # elements of an input row
    right: Any  # elements of padding after a row


@dataclass(frozen=True, slots=True)
class InputRowBuffer:
    """The input rows under `output_rows` output rows, with padding. A pixel has `channels` elements.

    `skips_rows`: of a dilated window over one output row only the rows that it reads are buffered.
    """

    height: int
    width: int
    channels: int
    rows: WindowDimension
    columns: WindowDimension
    output_rows: int
    lhs_bytes: int
    skips_rows: bool = False

    @property
    def pitch(self) -> int:
        """Bytes from one buffered row to the next: as wide as the windows reach, or the image if that is wider."""
        reach = (self.columns.count - 1) * self.columns.stride + self.columns.effective_kernel_size
        return max(self.columns.padding_low + self.width, reach) * self.channels * self.lhs_bytes

    @property
    def row_step(self) -> int:
        """Input rows from one buffered row to the next."""
        return self.rows.dilation if self.skips_rows and self.output_rows == 1 else 1

    @property
    def kernel_rows(self) -> int:
        """Buffered rows under an output row."""
        return (self.rows.effective_kernel_size - 1) // self.row_step + 1

    @property
    def tap_row_stride(self) -> int:
        """Bytes from one row of taps to the next."""
        return self.rows.dilation // self.row_step * self.pitch

    @property
    def row_count(self) -> int:
        """Buffered rows."""
        return (self.output_rows - 1) * self.rows.stride + self.kernel_rows

    @property
    def bytes(self) -> int:
        """Scratch memory that it takes."""
        return self.row_count * self.pitch + OVERREAD_BYTES

    def params(self, input_row_bytes: int) -> RowBufferParams:
        """Return its extents, for input rows of `input_row_bytes`."""
        left, within = self.columns.padding_low * self.channels, self.width * self.channels
        return RowBufferParams(
            height=self.height,
            row_stride=self.rows.stride,
            padding_top=self.rows.padding_low,
            kernel_rows=self.kernel_rows,
            row_step=self.row_step,
            input_row_bytes=input_row_bytes,
            pitch=self.pitch,
            left=left,
            within=within,
            right=self.pitch // self.lhs_bytes - left - within,
        )


def best_output_rows(buffer: InputRowBuffer, output_rows: int) -> int:
    """Return `output_rows` or 1, whichever buffers fewer rows for each output row."""
    several, one = replace(buffer, output_rows=output_rows), replace(buffer, output_rows=1)
    return output_rows if several.row_count <= output_rows * one.row_count else 1


def fill_row_buffer(
    kb: KernelBuilder,
    n: RowBufferParams,
    converter: InputConverter,
    image: Value,
    first: Value,
    output_rows: Value,
    pack_row: Callable[[Value, Value], None],
) -> None:
    """Emit a loop that fills the scratch memory with the rows under `output_rows` output rows from `first` on.

    `pack_row` emits the conversion of one row, from its address in the image to its address in scratch. Rows outside of
    the image are all padding. A row's padding is written in whole vectors, which may run into the next row: rows are
    filled in order, so the next row overwrites them, and `OVERREAD_BYTES` follow the last one.
    """
    top = kb.ir.sub(kb.ir.mul(first, n.row_stride), n.padding_top)
    row_count = kb.ir.add(kb.ir.mul(kb.ir.sub(output_rows, kb.i64(1)), n.row_stride), n.kernel_rows)
    size = converter.lhs_bytes
    with kb.loop(0, row_count) as number:
        row = kb.ir.add(top, kb.ir.mul(number, n.row_step))
        target = kb.at(kb.scratch, kb.ir.mul(number, n.pitch))
        is_inside = kb.ir.icmp_unsigned("<", row, n.height)  # unsigned: a row above the image has a large number
        with kb.ir.if_else(is_inside) as (inside, outside):
            with inside:
                _fill_padding(kb, converter, target, n.left)
                pixels = kb.at(target, kb.mul(n.left, size))
                pack_row(kb.at(image, kb.ir.mul(row, n.input_row_bytes)), pixels)
                _fill_padding(kb, converter, kb.at(pixels, kb.mul(n.within, size)), n.right)
            with outside:
                _fill_padding(kb, converter, target, kb.ir.add(kb.ir.add(n.left, n.within), n.right))


def pack_lhs_row(kb: KernelBuilder, converter: InputConverter, source: Value, target: Value, count: Value) -> None:
    """Emit the conversion of `count` elements. No other memory is read or written.

    Whole vectors first, then one vector that is moved back to end at the last element; fewer elements than a vector are
    converted one by one.
    """
    item, size = converter.item_bytes, converter.lhs_bytes
    lanes = 4 * kb.target.lanes // size

    def convert(offset: Value, elements: int) -> None:
        kb.store(converter.convert(kb, source, kb.mul(offset, item), elements), target, kb.mul(offset, size))

    aligned_count = kb.ir.and_(count, kb.i64(-lanes))
    with kb.loop(0, aligned_count, lanes) as offset:
        convert(offset, lanes)
    has_tail = kb.ir.icmp_signed("<", aligned_count, count)
    has_vector = kb.ir.icmp_signed(">=", count, kb.i64(lanes))
    with kb.ir.if_then(has_tail), kb.ir.if_else(has_vector) as (long, short):
        with long:
            convert(kb.ir.sub(count, kb.i64(lanes)), lanes)
        with short, kb.loop(0, count) as offset:
            convert(offset, 1)


def pack_lhs_row_repeated(
    kb: KernelBuilder, converter: InputConverter, source: Value, target: Value, count: Value, repeat: Value
) -> None:
    """Emit the conversion of `count` elements, each stored `repeat` times. Up to a vector after them is overwritten."""
    item, size, lanes = converter.item_bytes, converter.lhs_bytes, 4 * kb.target.lanes // converter.lhs_bytes
    with kb.loop(0, count) as index:
        one = kb.ir.extract_element(converter.convert(kb, source, kb.mul(index, item), 1), Constant(I32, 0))
        elements, first = kb.broadcast(one, lanes), kb.at(target, kb.ir.mul(index, kb.mul(repeat, size)))
        with kb.loop(0, repeat, lanes) as offset:
            kb.store(elements, first, kb.mul(offset, size))


def _fill_padding(kb: KernelBuilder, converter: InputConverter, target: Value, count: Value) -> None:
    """Emit the storing of `count` elements of padding. Up to a vector after them is overwritten."""
    size, lanes = converter.lhs_bytes, 4 * kb.target.lanes // converter.lhs_bytes
    with kb.loop(0, count, lanes) as offset:
        kb.store(converter.padding(kb, lanes), target, kb.mul(offset, size))


# -- RHS at run time ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackRhs(Kernel):
    """Packs matrices (batch, k, n) into panels of `nr` columns, filled up with 0. A work item is one panel.

    float32 is copied. Of int8, two rows at a time are interleaved for dot2, as int16 after subtracting `zero_point` and
    multiplying by `weight_prescale`; the last row of an odd k is paired with 0.
    """

    batch: int
    k: int
    n: int
    nr: int
    is_float: bool
    zero_point: int
    weight_prescale: int

    @property
    def work_items(self) -> int:
        """Panels of all matrices."""
        return self.batch * self._panels

    @property
    def bytes(self) -> int:
        """Size of the output."""
        return self.work_items * self._rows * self.nr * 4

    @property
    def _panels(self) -> int:
        return math.ceil(self.n / self.nr)

    @property
    def _kr(self) -> int:
        return 1 if self.is_float else 2

    @property
    def _rows(self) -> int:
        return math.ceil(self.k / self._kr)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: matrices, panels."""
        matrices, out = map(kb.argument, range(2))
        item = 4 if self.is_float else 1
        pitch, panel_row_bytes = self.n * item, self.nr * 4
        with kb.loop(kb.begin, kb.end) as work_item:
            number = kb.ir.udiv(work_item, kb.i64(self._panels))
            panel = kb.ir.urem(work_item, kb.i64(self._panels))
            first = kb.mul(panel, self.nr)
            columns = kb.intrinsic("llvm.smin", kb.i64(self.nr), kb.ir.sub(kb.i64(self.n), first))
            source = kb.at(matrices, kb.add(kb.mul(number, self.k * pitch), kb.mul(first, item)))
            target = kb.at(out, kb.mul(work_item, self._rows * panel_row_bytes))
            with kb.loop(0, self.k // self._kr) as row:
                self._emit_row(
                    kb,
                    kb.at(source, kb.mul(row, self._kr * pitch)),
                    kb.at(target, kb.mul(row, panel_row_bytes)),
                    columns,
                )
            if self.k % self._kr:
                last = kb.at(target, (self._rows - 1) * panel_row_bytes)
                self._emit_row(kb, kb.at(source, (self.k - 1) * pitch), last, columns, is_odd=True)
        kb.return_void()

    def _emit_row(self, kb: KernelBuilder, source: Value, target: Value, columns: Value, is_odd: bool = False) -> None:
        """Emit a panel's row of `columns` columns: vectors, then single columns, then zeros."""
        lanes = kb.target.lanes
        aligned_columns = kb.ir.and_(columns, kb.i64(-lanes))

        def store(begin: Value, end: Value, step: int, elements: Callable[[Value, int], Value]) -> None:
            with kb.loop(begin, end, step) as column:
                kb.store(elements(column, step), target, kb.mul(column, 4))

        def packed(column: Value, count: int) -> Value:
            if self.is_float:
                return kb.load(vector(F32, count), source, kb.mul(column, 4))
            first = self._minus_zero_point(kb, source, column, count)
            if is_odd:
                second = kb.splat(I16, 0, count)
            else:
                second = self._minus_zero_point(kb, kb.at(source, self.n), column, count)
            return kb.shuffle(first, second, [lane for n in range(count) for lane in (n, count + n)])

        store(kb.i64(0), aligned_columns, lanes, packed)
        store(aligned_columns, columns, 1, packed)
        store(columns, kb.i64(self.nr), 1, lambda column, count: Constant(I32, 0))

    def _minus_zero_point(self, kb: KernelBuilder, source: Value, column: Value, count: int) -> Value:
        """Return (value - zero_point) * weight_prescale in int16: at most 2 * 255 in magnitude."""
        wide = kb.ir.sext(kb.load(vector(I8, count), source, column), vector(I16, count))
        difference = kb.ir.sub(wide, kb.splat(I16, self.zero_point, count))
        return kb.ir.mul(difference, kb.splat(I16, self.weight_prescale, count))


@dataclass(frozen=True, slots=True)
class PackRhsBytes(Kernel):
    """Packs int8 matrices (batch, k, n) for dot4 or mmla, with a term for each column. A work item is one panel.

    Panels have `nr` columns, `kr` rows of which are interleaved; both are filled up with 0. With y the column's values
    and x' a row of the LHS as it is packed, sum((x' - zx)(y - zy)) is sum(x' y) - zy sum(x') - zx sum(y - zy). The last
    term is the column's, an int32; those of all columns follow the matrix's panels. `zero_point` is zy,
    `lhs_zero_point` zx.
    """

    batch: int
    k: int
    n: int
    nr: int
    kr: int
    zero_point: int
    lhs_zero_point: int

    @property
    def work_items(self) -> int:
        """Panels of all matrices."""
        return self.batch * self._panels

    @property
    def bytes(self) -> int:
        """Size of the output."""
        return self.batch * self._matrix_bytes

    @property
    def _panels(self) -> int:
        return math.ceil(self.n / self.nr)

    @property
    def _group_bytes(self) -> int:
        return self.nr * self.kr

    @property
    def _panel_bytes(self) -> int:
        return math.ceil(self.k / self.kr) * self._group_bytes

    @property
    def _matrix_bytes(self) -> int:
        return self._panels * (self._panel_bytes + 4 * self.nr)

    def emit(self, kb: KernelBuilder) -> None:
        """Args: matrices, panels."""
        matrices, out = map(kb.argument, range(2))
        lanes = kb.target.lanes
        with kb.loop(kb.begin, kb.end) as work_item:
            number = kb.ir.udiv(work_item, kb.i64(self._panels))
            panel = kb.ir.urem(work_item, kb.i64(self._panels))
            first = kb.mul(panel, self.nr)
            columns = kb.intrinsic("llvm.smin", kb.i64(self.nr), kb.ir.sub(kb.i64(self.n), first))
            source = kb.at(matrices, kb.add(kb.mul(number, self.k * self.n), first))
            matrix = kb.at(out, kb.mul(number, self._matrix_bytes))
            target = kb.at(matrix, kb.mul(panel, self._panel_bytes))
            terms = kb.at(matrix, kb.add(kb.mul(panel, 4 * self.nr), self._panels * self._panel_bytes))
            aligned = kb.ir.and_(columns, kb.i64(-lanes))
            for begin, end, step in ((kb.i64(0), aligned, lanes), (aligned, columns, 1)):
                with kb.loop(begin, end, step) as column:
                    place = kb.at(target, kb.mul(column, self.kr))
                    term = self._emit_columns(kb, kb.at(source, column), place, step)
                    kb.store(term, terms, kb.mul(column, 4))
            with kb.loop(columns, self.nr) as column:
                with kb.loop(0, self._panel_bytes, self._group_bytes) as group:
                    zeros = kb.splat(I8, 0, self.kr)
                    kb.store(zeros, target, kb.add(kb.mul(column, self.kr), group))
                kb.store(kb.splat(I32, 0, 1), terms, kb.mul(column, 4))
        kb.return_void()

    def _emit_columns(self, kb: KernelBuilder, source: Value, target: Value, lanes: int) -> Value:
        """Store `lanes` columns of a panel, and return their terms."""
        wide = vector(I32, lanes)

        def pack(first: Index, place: Value, rows: int, sums: Value) -> Value:
            loaded = [kb.load(vector(I8, lanes), source, kb.mul(kb.add(first, r), self.n)) for r in range(rows)]
            filled = [*loaded, *[kb.splat(I8, 0, lanes)] * (self.kr - rows)]
            kb.store(_interleaved(kb, filled), place)
            for values in loaded:
                sums = kb.ir.add(sums, kb.ir.sext(values, wide))
            return sums

        def pack_group(group: Value, carried: Sequence[Value]) -> Sequence[Value]:
            place = kb.at(target, kb.mul(group, self._group_bytes))
            return [pack(kb.mul(group, self.kr), place, self.kr, carried[0])]

        groups, remainder = divmod(self.k, self.kr)
        sums = kb.splat(I32, 0, lanes)
        if groups:
            (sums,) = kb.for_loop(groups, [sums], pack_group)
        if remainder:
            sums = pack(groups * self.kr, kb.at(target, groups * self._group_bytes), remainder, sums)
        values = kb.ir.sub(sums, kb.splat(I32, self.k * self.zero_point, lanes))
        return kb.ir.mul(values, kb.splat(I32, -self.lhs_zero_point, lanes))


def _interleaved(kb: KernelBuilder, values: Sequence[Value]) -> Value:
    """Return the first lanes of all values, then the second ones, and so on. There are 1, 2, 4 or 8."""
    if len(values) == 1:
        return values[0]
    first, second = _interleaved(kb, values[::2]), _interleaved(kb, values[1::2])
    count = first.type.count
    return kb.shuffle(first, second, [lane for n in range(count) for lane in (n, count + n)])


# -- RHS for acc16 -----------------------------------------------------------------------------------------------------

Int16s = npt.NDArray[np.int16]
Offsets = npt.NDArray[np.int64]

ACC16_KR = 8
"""Inputs of a K group."""

GROUP_LIST_ALIGNMENT = 64
"""Lists and the weights in them begin at multiples of it."""

_FOUR, _PAIR = 4, 2  # inputs of one dot4 lane; inputs of one pmaddubsw lane
_MAX_FOUR_SUM = 128  # 255 * 128 fits int16
_MAX_WEIGHT = 127


def split_for_acc16(groups: Int16s) -> Iterator[tuple[Offsets, Int16s]]:
    """Yield terms that keep the acc16 bound and sum to `groups` (groups, channels, 8): group numbers and their weights.

    Weights are from -255 to 255. Terminates: as long as weights are left, each term takes a part of every group that
    it lists.
    """
    numbers, left = np.arange(len(groups)), np.ascontiguousarray(groups)
    while True:
        is_nonzero = _in_words(left).reshape(len(left), -1).any(axis=1)
        if not is_nonzero.all():
            numbers, left = numbers[is_nonzero], left[is_nonzero]
        if not len(numbers):
            return
        breaks_bound = _breaks_bound(left)
        breaking = breaks_bound.any(axis=1)
        if not breaking.any():
            yield numbers, left
            return
        term = left.copy()
        term[breaks_bound] = _saturation_free_part(left[breaks_bound])
        yield numbers, term
        numbers, left = numbers[breaking], left[breaking] - term[breaking]


def _in_words(groups: Int16s) -> npt.NDArray[np.uint64]:
    """Return groups (..., 8) as words (..., 2) of four weights each: inputs 0 to 3, and 4 to 7."""
    return groups.view("<u8")


_LANE_BITS = 16  # of a weight in a word
_NO_INT8 = np.uint64(0x0080_0080_0080_0080)  # the bit that _MAX_WEIGHT lacks, in each lane
_SIGNS = np.uint64(0x8000_0000_8000)  # of lanes 0 and 2
_TO_SIGN = np.uint64((0x8000 - 1 - _MAX_FOUR_SUM) * 0x0001_0000_0001)  # sets the sign of a lane above _MAX_FOUR_SUM


def _breaks_bound(groups: Int16s) -> npt.NDArray[np.bool_]:
    """Return which of `groups` (..., 8) have a four that may overflow, or a weight that int8 does not hold.

    Computes with the four lanes of a word at once. No sum carries into the next lane: it is at most 4 * 255.
    """
    positive = np.maximum(groups, 0)
    is_found = np.zeros((), np.uint64)
    for magnitudes in (positive, positive - groups):
        words = _in_words(magnitudes)
        pair_sums = words[..., 0] + words[..., 1]
        four_sums = pair_sums + (pair_sums >> _LANE_BITS)  # inputs 0, 1, 4, 5 in lane 0; 2, 3, 6, 7 in lane 2
        is_found = is_found | (four_sums + _TO_SIGN) & _SIGNS
    words = _in_words(positive)
    result: npt.NDArray[np.bool_] = (is_found | (words[..., 0] | words[..., 1]) & _NO_INT8) != 0
    return result


def _saturation_free_part(groups: Int16s) -> Int16s:
    """Return the saturation-free part of `groups` (count, 8): of each four the first weights, up to 128 per sign."""
    fours = groups.reshape(-1, 2, _PAIR, _PAIR).swapaxes(1, 2)  # inputs 0, 1, 4, 5 and 2, 3, 6, 7
    flat = fours.reshape(-1, _PAIR, _FOUR)
    part = _clip_magnitudes(np.maximum(flat, 0), _MAX_WEIGHT) - _clip_magnitudes(np.maximum(-flat, 0), _MAX_FOUR_SUM)
    return part.reshape(fours.shape).swapaxes(1, 2).reshape(groups.shape)


def _clip_magnitudes(fours: Int16s, limit: int) -> Int16s:
    """Clip magnitudes (..., 4) greedily from the left: each to `limit`, and every four to a total of 128."""
    cumulative = np.minimum(np.cumsum(np.minimum(fours, limit), axis=-1, dtype=np.int16), _MAX_FOUR_SUM)
    cumulative[..., 1:] -= cumulative[..., :-1].copy()
    return cumulative


def group_list_length(panels: Int16s) -> int:
    """Return the number of entries in the lists of panels (panels, channels, taps, k of a tap)."""
    groups = _in_groups(panels).reshape(-1, panels.shape[1], ACC16_KR)
    return sum(len(numbers) for numbers, _ in split_for_acc16(groups))


def pack_group_lists(weights: Int16s, tap_offsets: Offsets) -> bytes:
    """Return the group lists of `weights` (panels, channels, taps, k of a tap).

    Begins with the offset and length of each panel's list. A list holds the byte offsets of its groups' inputs from a
    position's first (int32), then, aligned, the groups' weights (groups, 2, channels, 4). `tap_offsets` are the byte
    offsets of the taps' first inputs.
    """
    panels, _, _, k = weights.shape
    offsets = (tap_offsets[:, None] + ACC16_KR * np.arange(-(-k // ACC16_KR))).astype(np.int32).reshape(-1)
    panel_numbers, numbers, fours = _listed(_in_groups(weights))
    ends = np.searchsorted(panel_numbers, np.arange(panels), side="right").tolist()
    table, data, begin = np.zeros((panels, 2), np.int64), bytearray(16 * panels), 0
    for panel, end in enumerate(ends):
        data += bytes(-len(data) % GROUP_LIST_ALIGNMENT)
        table[panel] = len(data), end - begin
        data += offsets[numbers[begin:end]].tobytes()
        data += bytes(-len(data) % GROUP_LIST_ALIGNMENT)
        data += fours[begin:end].tobytes()
        begin = end
    data[: table.nbytes] = table.tobytes()
    return bytes(data)


def _listed(groups: Int16s) -> tuple[Offsets, Offsets, npt.NDArray[np.uint32]]:
    """Return the entries of all lists of weights (panels, groups, channels, 8), panel by panel, and in them by terms.

    An entry has the number of its panel, of its group in it, and weights (2, channels), each four of int8 in a word.
    """
    _, count, channels, _ = groups.shape
    terms = list(split_for_acc16(groups.reshape(-1, channels, ACC16_KR)))
    numbers = np.concatenate([np.zeros(0, np.int64), *(numbers for numbers, _ in terms)])
    weights = np.concatenate([np.zeros((0, channels, ACC16_KR), np.int8), *(term.astype(np.int8) for _, term in terms)])
    fours = weights.view(np.uint32)
    if len(terms) > 1:
        order = np.argsort(numbers // count, kind="stable")
        numbers, fours = numbers[order], fours[order]
    return numbers // count, numbers % count, fours.transpose(0, 2, 1)


def _in_groups(panels: Int16s) -> Int16s:
    """Return weights (panels, channels, taps, k of a tap) as (panels, groups, channels, 8). 0 fills taps up."""
    count, channels, taps, k = panels.shape
    filled = panels
    if k % ACC16_KR:
        filled = np.zeros((count, channels, taps, k + -k % ACC16_KR), np.int16)
        filled[..., :k] = panels
    return np.ascontiguousarray(filled.reshape(count, channels, -1, ACC16_KR).swapaxes(1, 2))
