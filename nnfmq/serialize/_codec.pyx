# cython: language_level=3, embedsignature=True, binding=False
"""The compiled packet codec. `packet.py` is the same in plain Python, and its specification; `datum.py` draws the records.

Whatever is out of the ordinary is left to the twin, so that there is one specification of it: numbers that are no plain
int, sequences that are no tuple or list, and everything that is wrong. An encoder that meets such a thing starts again
there, and the twin's bytes or error are the answer; a packet that the decoder refuses is decoded again there, from the
same private bytes, for the error's text and offset.

Three rules: every record is looked at only through `take` (or written through `put_record`), which compares with the
packet's end first; nothing that could run Python code happens between measuring what is to be encoded and writing it;
values are made and read through the slots of their classes, whose places are asked of the classes at import. Long
because both directions of both packets share these rules.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport UINT64_MAX, int32_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from nnfmq.hal import errors, types
from nnfmq.serialize import datum, packet as twin

cdef extern from *:
    """
    #include <structmember.h>

    /* The wire is little-endian on every machine; compilers make one instruction of each of these where it can be. */
    static inline uint32_t nnfmq_load32(const unsigned char *at) {
        return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    }
    static inline uint64_t nnfmq_load64(const unsigned char *at) {
        return nnfmq_load32(at) | (uint64_t)nnfmq_load32(at + 4) << 32;
    }
    static inline void nnfmq_store32(unsigned char *at, uint32_t value) {
        at[0] = (unsigned char)value, at[1] = (unsigned char)(value >> 8);
        at[2] = (unsigned char)(value >> 16), at[3] = (unsigned char)(value >> 24);
    }
    static inline void nnfmq_store64(unsigned char *at, uint64_t value) {
        nnfmq_store32(at, (uint32_t)value), nnfmq_store32(at + 4, (uint32_t)(value >> 32));
    }

    /* Where in its instances a class keeps the attribute `name`, which must be one of its __slots__; -1 = an error. */
    static Py_ssize_t nnfmq_slot(PyObject *type, const char *name) {
        Py_ssize_t offset = -1;
        PyObject *found = PyObject_GetAttrString(type, name);
        if (found == NULL)
            return -1;
        if (Py_TYPE(found) == &PyMemberDescr_Type && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
            offset = ((PyMemberDescrObject *)found)->d_member->offset;
        else
            PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
        Py_DECREF(found);
        return offset;
    }
    static inline PyObject *nnfmq_get(PyObject *value, Py_ssize_t slot) { /* borrowed; NULL = was never set */
        return *(PyObject **)((char *)value + slot);
    }
    static inline PyObject *nnfmq_new(PyObject *type) { /* with empty slots */
        return ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    }
    static inline void nnfmq_fill(PyObject *made, Py_ssize_t slot, PyObject *value) {
        *(PyObject **)((char *)made + slot) = Py_NewRef(value);
    }
    static inline int nnfmq_is(PyObject *value, PyObject *type) {
        return value != NULL && (PyObject *)Py_TYPE(value) == type;
    }
    static inline int nnfmq_is_row(PyObject *value) { /* PySequence_Fast's macros work on it, without Python code */
        return PyTuple_CheckExact(value) || PyList_CheckExact(value);
    }
    static inline int nnfmq_integer(PyObject *value, long long *number) {
        int overflow = 1;
        if (value != NULL && PyLong_CheckExact(value))
            *number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow == 0;
    }
    """
    uint32_t nnfmq_load32(const unsigned char *at) noexcept
    uint64_t nnfmq_load64(const unsigned char *at) noexcept
    void nnfmq_store32(unsigned char *at, uint32_t value) noexcept
    void nnfmq_store64(unsigned char *at, uint64_t value) noexcept
    Py_ssize_t nnfmq_slot(object type, const char *name) except -1
    PyObject *nnfmq_get(PyObject *value, Py_ssize_t slot) noexcept
    object nnfmq_new(object type)
    void nnfmq_fill(object made, Py_ssize_t slot, object value) noexcept
    bint nnfmq_is(PyObject *value, PyObject *type) noexcept
    bint nnfmq_is_row(PyObject *value) noexcept
    bint nnfmq_integer(PyObject *value, long long *number) noexcept
    Py_ssize_t PySequence_Fast_GET_SIZE(PyObject *row) noexcept
    PyObject *PySequence_Fast_GET_ITEM(PyObject *row, Py_ssize_t index) noexcept
    PyObject *Py_True
    PyObject *Py_False

cdef enum:  # as in `datum`
    RECORD = 24
    PACKET = 0
    INPUT = 1
    INPUT_DIMENSION = 2
    OUTPUT = 3
    OUTPUT_DIMENSION = 4
    POOL = 5
    MEASURE = 6
    SHAPE = 1
    SHAPE_DIMENSION = 2
    TIMING = 3
    LAST_HIDL_STATUS = 4
    PATCHED_RANK = 8  # arguments of a higher rank are left to the twin
    MAX_RECORDS = 1 << 26  # encoded here; more, which no ring holds, are left to the twin

assert RECORD == datum.DATUM_BYTES

cdef object RequestArgument = types.RequestArgument
cdef object DataLocation = types.DataLocation
cdef object OutputShape = types.OutputShape
cdef object Timing = types.Timing
cdef object RequestPacket = twin.RequestPacket
cdef object ResultPacket = twin.ResultPacket
cdef object ErrorStatus = errors.ErrorStatus
cdef object NO = types.MeasureTiming.NO
cdef object YES = types.MeasureTiming.YES
cdef object NO_TIMING = types.NO_TIMING
cdef tuple STATUSES = tuple([errors.ErrorStatus(number) for number in range(LAST_HIDL_STATUS + 1)])
cdef object NO_TIME = types.NO_TIME
cdef object ZERO = 0
cdef Py_ssize_t REMEMBERED_BYTES = twin.REMEMBERED_BYTES

cdef Py_ssize_t ARGUMENT_HAS_NO_VALUE = nnfmq_slot(RequestArgument, "has_no_value")
cdef Py_ssize_t ARGUMENT_LOCATION = nnfmq_slot(RequestArgument, "location")
cdef Py_ssize_t ARGUMENT_DIMENSIONS = nnfmq_slot(RequestArgument, "dimensions")
cdef Py_ssize_t LOCATION_POOL_INDEX = nnfmq_slot(DataLocation, "pool_index")
cdef Py_ssize_t LOCATION_OFFSET = nnfmq_slot(DataLocation, "offset")
cdef Py_ssize_t LOCATION_LENGTH = nnfmq_slot(DataLocation, "length")
cdef Py_ssize_t LOCATION_PADDING = nnfmq_slot(DataLocation, "padding")
cdef Py_ssize_t SHAPE_DIMENSIONS = nnfmq_slot(OutputShape, "dimensions")
cdef Py_ssize_t SHAPE_IS_SUFFICIENT = nnfmq_slot(OutputShape, "is_sufficient")
cdef Py_ssize_t TIMING_ON_DEVICE = nnfmq_slot(Timing, "time_on_device_ns")
cdef Py_ssize_t TIMING_IN_DRIVER = nnfmq_slot(Timing, "time_in_driver_ns")
cdef Py_ssize_t REQUEST_INPUTS = nnfmq_slot(RequestPacket, "inputs")
cdef Py_ssize_t REQUEST_OUTPUTS = nnfmq_slot(RequestPacket, "outputs")
cdef Py_ssize_t REQUEST_SLOTS = nnfmq_slot(RequestPacket, "slots")
cdef Py_ssize_t REQUEST_MEASURE = nnfmq_slot(RequestPacket, "measure")
cdef Py_ssize_t RESULT_STATUS = nnfmq_slot(ResultPacket, "status")
cdef Py_ssize_t RESULT_SHAPES = nnfmq_slot(ResultPacket, "output_shapes")
cdef Py_ssize_t RESULT_TIMING = nnfmq_slot(ResultPacket, "timing")


# ------------------------------------------------------------------------------------------------ encode: plain values
# Each of these returns False where the value is none that it takes; then the twin is asked.

cdef struct Pen:  # where the next record goes, and where the packet ends
    unsigned char *at
    unsigned char *end


cdef inline unsigned char *put_record(Pen *pen, unsigned char kind) noexcept:
    """Return where the next record lies, zeroed but for its kind; NULL at the packet's end."""
    cdef unsigned char *record = pen.at
    if pen.end - record < RECORD:
        return NULL
    pen.at = record + RECORD
    memset(record, 0, RECORD)
    record[0] = kind
    return record


cdef inline bint put_u32(unsigned char *at, PyObject *value) noexcept:
    cdef long long number
    if not nnfmq_integer(value, &number) or not 0 <= number <= 0xFFFFFFFF:
        return False
    nnfmq_store32(at, <uint32_t>number)
    return True


cdef inline bint put_i32(unsigned char *at, PyObject *value) noexcept:
    cdef long long number
    if not nnfmq_integer(value, &number) or not -0x80000000 <= number <= 0x7FFFFFFF:
        return False
    nnfmq_store32(at, <uint32_t>number)
    return True


cdef inline bint put_flag(unsigned char *at, PyObject *value) noexcept:
    if value != Py_True and value != Py_False:
        return False
    at[0] = value == Py_True
    return True


cdef inline bint put_microseconds(unsigned char *at, PyObject *value) noexcept:
    cdef long long number
    if not nnfmq_integer(value, &number) or number < -1:
        return False
    nnfmq_store64(at, UINT64_MAX if number == -1 else <uint64_t>(number // 1000))
    return True


cdef Py_ssize_t records_of(PyObject *row, PyObject *type, Py_ssize_t dimensions) noexcept:
    """Return how many records these arguments or shapes take, whose slot `dimensions` has a tuple; -1 = not plain."""
    cdef Py_ssize_t records = 0, index
    cdef PyObject *item
    if not nnfmq_is_row(row):
        return -1
    for index in range(PySequence_Fast_GET_SIZE(row)):
        item = PySequence_Fast_GET_ITEM(row, index)
        if not nnfmq_is(item, type) or not nnfmq_is(nnfmq_get(item, dimensions), <PyObject *>tuple):
            return -1
        records += 1 + PySequence_Fast_GET_SIZE(nnfmq_get(item, dimensions))
        if records > MAX_RECORDS:
            return -1
    return records


cdef bint put_dimensions(Pen *pen, PyObject *dimensions, unsigned char kind, Py_ssize_t offset) noexcept:
    """Write one record for each; its value lies at `offset`."""
    cdef unsigned char *record
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(dimensions)):
        record = put_record(pen, kind)
        if record == NULL or not put_u32(record + offset, PySequence_Fast_GET_ITEM(dimensions, index)):
            return False
    return True


# ------------------------------------------------------------------------------------------------ encode a request

cdef bint put_argument(Pen *pen, PyObject *argument, unsigned char operand, unsigned char dimension) noexcept:
    """Write a RequestArgument, whose dimensions are a tuple."""
    cdef PyObject *location = nnfmq_get(argument, ARGUMENT_LOCATION)
    cdef PyObject *dimensions = nnfmq_get(argument, ARGUMENT_DIMENSIONS)
    cdef unsigned char *record = put_record(pen, operand)
    if record == NULL or not nnfmq_is(location, <PyObject *>DataLocation):
        return False
    nnfmq_store32(record + 20, <uint32_t>PySequence_Fast_GET_SIZE(dimensions))
    return (
        put_flag(record + 4, nnfmq_get(argument, ARGUMENT_HAS_NO_VALUE))
        and put_u32(record + 8, nnfmq_get(location, LOCATION_POOL_INDEX))
        and put_u32(record + 12, nnfmq_get(location, LOCATION_OFFSET))
        and put_u32(record + 16, nnfmq_get(location, LOCATION_LENGTH))
        and put_dimensions(pen, dimensions, dimension, 4)
    )


cdef bint put_arguments(Pen *pen, PyObject *row, unsigned char operand, unsigned char dimension) noexcept:
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(row)):
        if not put_argument(pen, PySequence_Fast_GET_ITEM(row, index), operand, dimension):
            return False
    return True


cdef bint put_slots(Pen *pen, PyObject *slots) noexcept:
    cdef unsigned char *record
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(slots)):
        record = put_record(pen, POOL)
        if record == NULL or not put_i32(record + 4, PySequence_Fast_GET_ITEM(slots, index)):
            return False
    return True


cdef bint put_request(Pen *pen, PyObject *inputs, PyObject *outputs, PyObject *slots, bint measure) noexcept:
    cdef unsigned char *head = put_record(pen, PACKET)
    cdef unsigned char *last
    if head == NULL:
        return False
    nnfmq_store32(head + 4, <uint32_t>((pen.end - head) // RECORD))
    nnfmq_store32(head + 8, <uint32_t>PySequence_Fast_GET_SIZE(inputs))
    nnfmq_store32(head + 12, <uint32_t>PySequence_Fast_GET_SIZE(outputs))
    nnfmq_store32(head + 16, <uint32_t>PySequence_Fast_GET_SIZE(slots))
    if not (put_arguments(pen, inputs, INPUT, INPUT_DIMENSION)
            and put_arguments(pen, outputs, OUTPUT, OUTPUT_DIMENSION) and put_slots(pen, slots)):
        return False
    last = put_record(pen, MEASURE)
    if last == NULL:
        return False
    nnfmq_store32(last + 4, measure)
    return pen.at == pen.end


cdef bytes paper(Pen *pen, Py_ssize_t records):
    """Return bytes of that many records, to be written by `pen` from their beginning."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, RECORD * records)
    pen.at = <unsigned char *>PyBytes_AS_STRING(data)
    pen.end = pen.at + RECORD * records
    return data


cdef bytes plain_request(object inputs, object outputs, object slots, object measure):
    """Return the packet; None if it has to be left to the twin."""
    cdef Pen pen
    cdef bytes data
    cdef PyObject *first = <PyObject *>inputs
    cdef PyObject *second = <PyObject *>outputs
    cdef Py_ssize_t input_records = records_of(first, <PyObject *>RequestArgument, ARGUMENT_DIMENSIONS)
    cdef Py_ssize_t output_records = records_of(second, <PyObject *>RequestArgument, ARGUMENT_DIMENSIONS)
    if input_records < 0 or output_records < 0 or not nnfmq_is_row(<PyObject *>slots):
        return None
    if (measure is not NO and measure is not YES) or PySequence_Fast_GET_SIZE(<PyObject *>slots) > MAX_RECORDS:
        return None
    data = paper(&pen, 2 + input_records + output_records + PySequence_Fast_GET_SIZE(<PyObject *>slots))
    return data if put_request(&pen, first, second, <PyObject *>slots, measure is YES) else None


def encode_request(inputs, outputs, slots, measure=NO):
    """Return the packet of one request; `slots[i]` names the memory of pool i within the burst.

    Raises InvalidArgument for a number that its field cannot hold (u32; slots i32).
    """
    cdef bytes data = plain_request(inputs, outputs, slots, measure)
    return twin.encode_request(inputs, outputs, slots, measure) if data is None else data


# ------------------------------------------------------------------------------------------------ encode a result

cdef bint put_shapes(Pen *pen, PyObject *row) noexcept:
    cdef unsigned char *record
    cdef PyObject *shape
    cdef PyObject *dimensions
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(row)):
        shape = PySequence_Fast_GET_ITEM(row, index)
        dimensions = nnfmq_get(shape, SHAPE_DIMENSIONS)
        record = put_record(pen, SHAPE)
        if record == NULL or not put_flag(record + 8, nnfmq_get(shape, SHAPE_IS_SUFFICIENT)):
            return False
        nnfmq_store32(record + 12, <uint32_t>PySequence_Fast_GET_SIZE(dimensions))
        if not put_dimensions(pen, dimensions, SHAPE_DIMENSION, 8):
            return False
    return True


cdef bint put_result(Pen *pen, uint32_t status, PyObject *shapes, PyObject *timing) noexcept:
    cdef unsigned char *head = put_record(pen, PACKET)
    cdef unsigned char *last
    if head == NULL:
        return False
    nnfmq_store32(head + 8, <uint32_t>((pen.end - head) // RECORD))
    nnfmq_store32(head + 12, status)
    nnfmq_store32(head + 16, <uint32_t>PySequence_Fast_GET_SIZE(shapes))
    if not put_shapes(pen, shapes):
        return False
    last = put_record(pen, TIMING)
    return (
        last != NULL
        and put_microseconds(last + 8, nnfmq_get(timing, TIMING_ON_DEVICE))
        and put_microseconds(last + 16, nnfmq_get(timing, TIMING_IN_DRIVER))
        and pen.at == pen.end
    )


cdef bytes plain_result(object status, object shapes, object timing):
    """Return the packet; None if it has to be left to the twin."""
    cdef Pen pen
    cdef bytes data
    cdef long number
    cdef Py_ssize_t records = records_of(<PyObject *>shapes, <PyObject *>OutputShape, SHAPE_DIMENSIONS)
    if records < 0 or type(status) is not ErrorStatus or type(timing) is not Timing:
        return None
    number = status
    if number > LAST_HIDL_STATUS:
        number = STATUSES[2]
    data = paper(&pen, 2 + records)
    return data if put_result(&pen, <uint32_t>number, <PyObject *>shapes, <PyObject *>timing) else None


def encode_result(status, shapes, timing=NO_TIMING):
    """Return the packet of one result; nanoseconds are rounded down to the microseconds of the wire.

    Statuses that HAL 1.0 does not have are sent as GENERAL_FAILURE. Raises InvalidArgument for a number that its
    field cannot hold (dimensions u32, times u64 µs).
    """
    cdef bytes data = plain_result(status, shapes, timing)
    return twin.encode_result(status, shapes, timing) if data is None else data


# ------------------------------------------------------------------------------------------------ templates

cdef class RequestTemplate:
    """A request that is sent again and again: its packet lies ready, and what changes is patched in place.

    `packet` is a read-only view of the bytes as they are now, for `MessageQueue.send`. Each change is made whole, or
    refused by InvalidArgument and not at all: an index that is not there, a number that its field cannot hold, or
    another rank, since it would move all that follows (make a new template). Not for two threads at once.
    """

    cdef object twin  # has the bytes; plain changes are written here, all others by itself
    cdef Py_buffer held  # of those bytes, which keeps them where they are
    cdef readonly object packet
    cdef tuple inputs, outputs, slots  # where in the bytes each lies

    def __cinit__(self, inputs, outputs, slots, measure=NO):
        self.twin = twin.RequestTemplate(inputs, outputs, slots, measure)
        self.packet = self.twin.packet
        self.inputs, self.outputs = tuple(self.twin._inputs), tuple(self.twin._outputs)
        self.slots = tuple(self.twin._slots)
        PyObject_GetBuffer(self.twin._data, &self.held, PyBUF_SIMPLE | PyBUF_WRITABLE)

    def __dealloc__(self):
        PyBuffer_Release(&self.held)  # does nothing where it was never had

    cdef unsigned char *place(self, tuple places, object index) except? NULL:
        """Return where the record of this index lies; NULL if that has to be left to the twin."""
        cdef long long number
        if not nnfmq_integer(<PyObject *>index, &number) or not 0 <= number < len(places):
            return NULL
        return <unsigned char *>self.held.buf + <Py_ssize_t>places[number]

    cdef bint set_argument(self, unsigned char *at, PyObject *argument, unsigned char kind) except -1:
        """Patch a whole argument; False where nothing was changed."""
        cdef unsigned char records[RECORD * (1 + PATCHED_RANK)]  # written here first: all of it fits, or none is taken
        cdef Pen pen
        cdef Py_ssize_t rank = plain_rank(argument)
        cdef const unsigned char *end = <unsigned char *>self.held.buf + self.held.len
        if at == NULL or end - at < RECORD * (1 + rank) or not 0 <= rank <= PATCHED_RANK or nnfmq_load32(at + 20) != <uint32_t>rank:
            return False
        pen.at, pen.end = records, records + RECORD * (1 + rank)
        if not put_argument(&pen, argument, kind, kind + 1):
            return False
        memcpy(at, records, RECORD * (1 + rank))
        return True

    def set_input(self, index, argument):
        """Let input `index` be `argument` from now on, of the same rank."""
        if not self.set_argument(self.place(self.inputs, index), <PyObject *>argument, INPUT):
            self.twin.set_input(index, argument)

    def set_output(self, index, argument):
        """Let output `index` be `argument` from now on, of the same rank."""
        if not self.set_argument(self.place(self.outputs, index), <PyObject *>argument, OUTPUT):
            self.twin.set_output(index, argument)

    def set_slot(self, index, slot):
        """Let `slot` name the memory of pool `index` from now on."""
        cdef unsigned char *at = self.place(self.slots, index)
        if at == NULL or not put_i32(at + 4, <PyObject *>slot):
            self.twin.set_slot(index, slot)

    def set_measure(self, measure):
        """Ask for timing from now on, or no longer."""
        if measure is not NO and measure is not YES:
            self.twin.set_measure(measure)
            return
        nnfmq_store32(<unsigned char *>self.held.buf + self.held.len - RECORD + 4, measure is YES)


cdef inline Py_ssize_t plain_rank(PyObject *argument) noexcept:
    """Return the rank of a RequestArgument whose dimensions are a tuple; -1 for anything else."""
    if not nnfmq_is(argument, <PyObject *>RequestArgument):
        return -1
    argument = nnfmq_get(argument, ARGUMENT_DIMENSIONS)
    return PySequence_Fast_GET_SIZE(argument) if nnfmq_is(argument, <PyObject *>tuple) else -1


# ------------------------------------------------------------------------------------------------ decode
# Each of these returns None (or NULL) where the packet is not well-formed; then the twin says what is wrong with it.

cdef struct Cursor:  # the next record, and where the packet ends
    const unsigned char *at
    const unsigned char *end


cdef inline const unsigned char *take(Cursor *cursor, unsigned char kind) noexcept:
    """Return the next record and go on; NULL at the packet's end and where the record is of another kind."""
    cdef const unsigned char *record = cursor.at
    if cursor.end - record < RECORD or record[0] != kind:
        return NULL
    cursor.at = record + RECORD
    return record


cdef inline uint64_t left(const Cursor *cursor) noexcept:
    return <uint64_t>(cursor.end - cursor.at) // RECORD


cdef const unsigned char *take_whole(Cursor *cursor, bytes data, Py_ssize_t size_at) noexcept:
    """Begin with `data` and take its packetInformation, whose packetSize lies at `size_at`."""
    cdef const unsigned char *head
    cursor.at = <const unsigned char *>PyBytes_AS_STRING(data)
    cursor.end = cursor.at + PyBytes_GET_SIZE(data)
    head = take(cursor, PACKET)
    if head == NULL or <uint64_t>nnfmq_load32(head + size_at) * RECORD != <uint64_t>PyBytes_GET_SIZE(data):
        return NULL
    return head


cdef tuple take_dimensions(Cursor *cursor, uint32_t rank, unsigned char kind, Py_ssize_t offset):
    cdef const unsigned char *record
    cdef uint32_t index
    cdef tuple dimensions
    if rank > left(cursor):
        return None
    dimensions = PyTuple_New(rank)
    for index in range(rank):
        record = take(cursor, kind)
        if record == NULL:
            return None
        keep(dimensions, index, nnfmq_load32(record + offset))
    return dimensions


cdef inline void keep(tuple row, Py_ssize_t index, object item):
    Py_INCREF(item)  # SET_ITEM takes it over
    PyTuple_SET_ITEM(row, index, item)


cdef object take_argument(Cursor *cursor, unsigned char operand, unsigned char dimension):
    cdef const unsigned char *record = take(cursor, operand)
    if record == NULL or record[4] > 1:
        return None
    dimensions = take_dimensions(cursor, nnfmq_load32(record + 20), dimension, 4)
    if dimensions is None:
        return None
    location = nnfmq_new(DataLocation)
    nnfmq_fill(location, LOCATION_POOL_INDEX, nnfmq_load32(record + 8))
    nnfmq_fill(location, LOCATION_OFFSET, nnfmq_load32(record + 12))
    nnfmq_fill(location, LOCATION_LENGTH, nnfmq_load32(record + 16))
    nnfmq_fill(location, LOCATION_PADDING, ZERO)
    argument = nnfmq_new(RequestArgument)
    nnfmq_fill(argument, ARGUMENT_HAS_NO_VALUE, record[4] == 1)
    nnfmq_fill(argument, ARGUMENT_LOCATION, location)
    nnfmq_fill(argument, ARGUMENT_DIMENSIONS, dimensions)
    return argument


cdef tuple take_arguments(Cursor *cursor, uint32_t count, unsigned char operand, unsigned char dimension):
    cdef tuple arguments = PyTuple_New(count)
    cdef uint32_t index
    for index in range(count):
        argument = take_argument(cursor, operand, dimension)
        if argument is None:
            return None
        keep(arguments, index, argument)
    return arguments


cdef tuple take_slots(Cursor *cursor, uint32_t count):
    cdef tuple slots = PyTuple_New(count)
    cdef const unsigned char *record
    cdef uint32_t index
    for index in range(count):
        record = take(cursor, POOL)
        if record == NULL:
            return None
        keep(slots, index, <int32_t>nnfmq_load32(record + 4))
    return slots


cdef object well_formed_request(bytes data):
    cdef Cursor cursor
    cdef const unsigned char *head = take_whole(&cursor, data, 4)
    cdef const unsigned char *last
    if head == NULL:
        return None
    if <uint64_t>1 + nnfmq_load32(head + 8) + nnfmq_load32(head + 12) + nnfmq_load32(head + 16) > left(&cursor):
        return None
    inputs = take_arguments(&cursor, nnfmq_load32(head + 8), INPUT, INPUT_DIMENSION)
    if inputs is None:
        return None
    outputs = take_arguments(&cursor, nnfmq_load32(head + 12), OUTPUT, OUTPUT_DIMENSION)
    if outputs is None:
        return None
    slots = take_slots(&cursor, nnfmq_load32(head + 16))
    last = take(&cursor, MEASURE)
    if slots is None or last == NULL or nnfmq_load32(last + 4) > 1 or cursor.at != cursor.end:
        return None
    request = nnfmq_new(RequestPacket)
    nnfmq_fill(request, REQUEST_INPUTS, inputs)
    nnfmq_fill(request, REQUEST_OUTPUTS, outputs)
    nnfmq_fill(request, REQUEST_SLOTS, slots)
    nnfmq_fill(request, REQUEST_MEASURE, YES if nnfmq_load32(last + 4) else NO)
    return request


cdef object take_shape(Cursor *cursor):
    cdef const unsigned char *record = take(cursor, SHAPE)
    if record == NULL or record[8] > 1:
        return None
    dimensions = take_dimensions(cursor, nnfmq_load32(record + 12), SHAPE_DIMENSION, 8)
    if dimensions is None:
        return None
    shape = nnfmq_new(OutputShape)
    nnfmq_fill(shape, SHAPE_DIMENSIONS, dimensions)
    nnfmq_fill(shape, SHAPE_IS_SUFFICIENT, record[8] == 1)
    return shape


cdef tuple take_shapes(Cursor *cursor, uint32_t count):
    cdef tuple shapes = PyTuple_New(count)
    cdef uint32_t index
    for index in range(count):
        shape = take_shape(cursor)
        if shape is None:
            return None
        keep(shapes, index, shape)
    return shapes


cdef object nanoseconds(uint64_t time_us):
    if time_us == UINT64_MAX:
        return NO_TIME
    return <object>(time_us * 1000) if time_us <= UINT64_MAX // 1000 else <object>time_us * 1000


cdef object timing_of(const unsigned char *record):
    cdef uint64_t on_device = nnfmq_load64(record + 8), in_driver = nnfmq_load64(record + 16)
    if on_device == UINT64_MAX and in_driver == UINT64_MAX:
        return NO_TIMING
    timing = nnfmq_new(Timing)
    nnfmq_fill(timing, TIMING_ON_DEVICE, nanoseconds(on_device))
    nnfmq_fill(timing, TIMING_IN_DRIVER, nanoseconds(in_driver))
    return timing


cdef object well_formed_result(bytes data):
    cdef Cursor cursor
    cdef const unsigned char *head = take_whole(&cursor, data, 8)
    cdef const unsigned char *last
    if head == NULL or nnfmq_load32(head + 12) > LAST_HIDL_STATUS:
        return None
    if <uint64_t>1 + nnfmq_load32(head + 16) > left(&cursor):
        return None
    shapes = take_shapes(&cursor, nnfmq_load32(head + 16))
    last = take(&cursor, TIMING)
    if shapes is None or last == NULL or cursor.at != cursor.end:
        return None
    result = nnfmq_new(ResultPacket)
    nnfmq_fill(result, RESULT_STATUS, STATUSES[nnfmq_load32(head + 12)])
    nnfmq_fill(result, RESULT_SHAPES, shapes)
    nnfmq_fill(result, RESULT_TIMING, timing_of(last))
    return result


cdef inline bytes private(object data):
    return data if type(data) is bytes else bytes(data)


cdef int refuse(object decode, bytes data) except -1:
    """Raise what the twin says of a packet that was refused here."""
    decode(data)
    raise errors.GeneralFailure(f"the two codecs disagree: only the compiled one refuses {data.hex()}")


def decode_request(data):
    """Return the request in `data`, which is copied first if it can change. Raises ProtocolError, with `offset`."""
    cdef bytes packet = private(data)
    request = well_formed_request(packet)
    if request is None:
        refuse(twin.decode_request, packet)
    return request


def decode_result(data):
    """Return the result in `data`, which is copied first if it can change. Raises ProtocolError, with `offset`."""
    cdef bytes packet = private(data)
    result = well_formed_result(packet)
    if result is None:
        refuse(twin.decode_result, packet)
    return result


cdef class Decoder:
    """Decodes by `decode_request` or `decode_result`, and answers with the same object while the bytes are the same.

    It keeps the last well-formed packet, and none above 4 KiB. Not for two threads at once.
    """

    cdef object fresh
    cdef bytes data
    cdef object packet

    def __cinit__(self, decode):
        self.fresh = decode

    def decode(self, data):
        """Return what `data` says; it is copied first if it can change. Raises ProtocolError, with `offset`."""
        cdef bytes copied = private(data), last = self.data
        cdef Py_ssize_t size = PyBytes_GET_SIZE(copied)
        if last is not None and size == PyBytes_GET_SIZE(last) and not memcmp(
            PyBytes_AS_STRING(copied), PyBytes_AS_STRING(last), size
        ):
            return self.packet
        packet, old = self.fresh(copied), self.packet  # `old` lives on until both are replaced
        if size <= REMEMBERED_BYTES:
            self.data, self.packet = copied, packet
        return packet
