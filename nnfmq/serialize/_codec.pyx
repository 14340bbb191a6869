# cython: language_level=3, embedsignature=True, binding=False
"""The compiled packet codec. `_pycodec` is the same in Python and specifies it; `packets` documents the records.

It pays if consecutive requests of a burst differ, so that each has to be decoded: with the null model over two or eight
memories in turn, the p50 of a round trip is 57 µs instead of 91 µs (docs/explanation/performance.md). If all requests
are equal, as in `Burst.execute`, client and driver compare bytes and neither codec runs.

Everything out of the ordinary is left to the Python codec, so that there is one specification of it: numbers that are
not exactly int, sequences other than tuple and list, and every error. An encoder that meets such a value calls the
Python codec from the start, whose bytes or error are the result. A packet that the decoder rejects is decoded again by
the Python codec, from the same private copy, for the text and the offset of the error.

Three rules keep the C code correct:

- Bounds: a record is read only through `read_record` and written only through `put_record`; both compare with the
  packet's end first.
- Reentrancy: no Python code can run between measuring the values to encode (`count_records`) and writing them. All
  checks are of exact types, and attributes are read directly from the instances' slots, so a value cannot change or
  grow in between, and the buffer, which was allocated for the measured size, suffices. `put_record` checks it anyway.
- Layout of Python objects: the offsets of slots are read from the classes' member descriptors at import, never
  assumed. Instances are created without their constructors, which for frozen dataclasses take most of the time of
  decoding (0.7 µs each); every slot of a new instance is filled before the instance is visible to Python code.

Long because both directions of both packets share these rules.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport UINT64_MAX, int32_t, uint32_t, uint64_t
from libc.string cimport memset

from nnfmq.hal import errors, timing as timing_module, types
from nnfmq.serialize import _pycodec as pycodec, packets

cdef extern from *:
    """
    #include <structmember.h>

    /* The wire is little-endian. Compilers turn each of these into one instruction on a little-endian machine. */
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

    /* Return the offset of slot `name` (one of the __slots__ of `type`) in instances; -1 with an exception set. */
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
    static inline PyObject *nnfmq_get(PyObject *value, Py_ssize_t slot) { /* borrowed; NULL if it was never set */
        return *(PyObject **)((char *)value + slot);
    }
    static inline PyObject *nnfmq_new(PyObject *type) { /* an instance with empty slots */
        return ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    }
    static inline void nnfmq_fill(PyObject *made, Py_ssize_t slot, PyObject *value) {
        *(PyObject **)((char *)made + slot) = Py_NewRef(value);
    }
    static inline int nnfmq_is(PyObject *value, PyObject *type) {
        return value != NULL && (PyObject *)Py_TYPE(value) == type;
    }
    /* PySequence_Fast's macros read these types without running Python code. */
    static inline int nnfmq_is_list_or_tuple(PyObject *value) {
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
    bint nnfmq_is_list_or_tuple(PyObject *value) noexcept
    bint nnfmq_integer(PyObject *value, long long *number) noexcept
    Py_ssize_t PySequence_Fast_GET_SIZE(PyObject *values) noexcept
    PyObject *PySequence_Fast_GET_ITEM(PyObject *values, Py_ssize_t index) noexcept
    PyObject *Py_True
    PyObject *Py_False

cdef enum:  # as in `packets`
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
    MAX_RECORDS = 1 << 26  # larger packets, which fit into no ring, are left to the Python codec

assert RECORD == packets.DATUM_BYTES

cdef object RequestArgument = types.RequestArgument
cdef object DataLocation = types.DataLocation
cdef object OutputShape = types.OutputShape
cdef object Timing = timing_module.Timing
cdef object RequestPacket = packets.RequestPacket
cdef object ResultPacket = packets.ResultPacket
cdef object ErrorStatus = errors.ErrorStatus
cdef object NO = types.MeasureTiming.NO
cdef object YES = types.MeasureTiming.YES
cdef object NO_TIMING = timing_module.NO_TIMING
cdef tuple STATUSES = tuple([errors.ErrorStatus(number) for number in range(LAST_HIDL_STATUS + 1)])
cdef object from_packet_duration = timing_module.from_packet_duration
cdef object to_packet_duration = timing_module.to_packet_duration
cdef object ZERO = 0

cdef Py_ssize_t ARGUMENT_HAS_NO_VALUE = nnfmq_slot(RequestArgument, "has_no_value")
cdef Py_ssize_t ARGUMENT_LOCATION = nnfmq_slot(RequestArgument, "location")
cdef Py_ssize_t ARGUMENT_DIMENSIONS = nnfmq_slot(RequestArgument, "dimensions")
cdef Py_ssize_t LOCATION_POOL_INDEX = nnfmq_slot(DataLocation, "pool_index")
cdef Py_ssize_t LOCATION_OFFSET = nnfmq_slot(DataLocation, "offset")
cdef Py_ssize_t LOCATION_LENGTH = nnfmq_slot(DataLocation, "length")
cdef Py_ssize_t LOCATION_PADDING = nnfmq_slot(DataLocation, "padding")
cdef Py_ssize_t SHAPE_DIMENSIONS = nnfmq_slot(OutputShape, "dimensions")
cdef Py_ssize_t SHAPE_IS_SUFFICIENT = nnfmq_slot(OutputShape, "is_sufficient")
cdef Py_ssize_t REQUEST_INPUTS = nnfmq_slot(RequestPacket, "inputs")
cdef Py_ssize_t REQUEST_OUTPUTS = nnfmq_slot(RequestPacket, "outputs")
cdef Py_ssize_t REQUEST_SLOTS = nnfmq_slot(RequestPacket, "slots")
cdef Py_ssize_t REQUEST_MEASURE = nnfmq_slot(RequestPacket, "measure")
cdef Py_ssize_t RESULT_STATUS = nnfmq_slot(ResultPacket, "status")
cdef Py_ssize_t RESULT_SHAPES = nnfmq_slot(ResultPacket, "output_shapes")
cdef Py_ssize_t RESULT_TIMING = nnfmq_slot(ResultPacket, "timing")


# ------------------------------------------------------------------------------------------------ encode: plain values
# Each of these returns False for a value that is left to the Python codec.

cdef struct Writer:  # the position of the next record, and the end of the packet
    unsigned char *at
    unsigned char *end


cdef inline unsigned char *put_record(Writer *writer, unsigned char kind) noexcept:
    """Return the next record, zeroed except for its kind; NULL at the packet's end."""
    cdef unsigned char *record = writer.at
    if writer.end - record < RECORD:
        return NULL
    writer.at = record + RECORD
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


cdef Py_ssize_t count_records(PyObject *values, PyObject *type, Py_ssize_t dimensions) noexcept:
    """Return the number of records of these arguments or shapes; -1 if they are left to the Python codec.

    `dimensions` is the offset of their slot of that name, which must contain a tuple.
    """
    cdef Py_ssize_t records = 0, index
    cdef PyObject *item
    if not nnfmq_is_list_or_tuple(values):
        return -1
    for index in range(PySequence_Fast_GET_SIZE(values)):
        item = PySequence_Fast_GET_ITEM(values, index)
        if not nnfmq_is(item, type) or not nnfmq_is(nnfmq_get(item, dimensions), <PyObject *>tuple):
            return -1
        records += 1 + PySequence_Fast_GET_SIZE(nnfmq_get(item, dimensions))
        if records > MAX_RECORDS:
            return -1
    return records


cdef bint put_dimensions(Writer *writer, PyObject *dimensions, unsigned char kind, Py_ssize_t offset) noexcept:
    """Write one record for each dimension, with its value at `offset`."""
    cdef unsigned char *record
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(dimensions)):
        record = put_record(writer, kind)
        if record == NULL or not put_u32(record + offset, PySequence_Fast_GET_ITEM(dimensions, index)):
            return False
    return True


# ------------------------------------------------------------------------------------------------ encode a request

cdef bint put_argument(Writer *writer, PyObject *argument, unsigned char operand, unsigned char dimension) noexcept:
    """Write a RequestArgument, whose dimensions are a tuple."""
    cdef PyObject *location = nnfmq_get(argument, ARGUMENT_LOCATION)
    cdef PyObject *dimensions = nnfmq_get(argument, ARGUMENT_DIMENSIONS)
    cdef unsigned char *record = put_record(writer, operand)
    if record == NULL or not nnfmq_is(location, <PyObject *>DataLocation):
        return False
    nnfmq_store32(record + 20, <uint32_t>PySequence_Fast_GET_SIZE(dimensions))
    return (
        put_flag(record + 4, nnfmq_get(argument, ARGUMENT_HAS_NO_VALUE))
        and put_u32(record + 8, nnfmq_get(location, LOCATION_POOL_INDEX))
        and put_u32(record + 12, nnfmq_get(location, LOCATION_OFFSET))
        and put_u32(record + 16, nnfmq_get(location, LOCATION_LENGTH))
        and put_dimensions(writer, dimensions, dimension, 4)
    )


cdef bint put_arguments(Writer *writer, PyObject *values, unsigned char operand, unsigned char dimension) noexcept:
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(values)):
        if not put_argument(writer, PySequence_Fast_GET_ITEM(values, index), operand, dimension):
            return False
    return True


cdef bint put_slots(Writer *writer, PyObject *slots) noexcept:
    cdef unsigned char *record
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(slots)):
        record = put_record(writer, POOL)
        if record == NULL or not put_i32(record + 4, PySequence_Fast_GET_ITEM(slots, index)):
            return False
    return True


cdef bint put_request(Writer *writer, PyObject *inputs, PyObject *outputs, PyObject *slots, bint measure) noexcept:
    cdef unsigned char *head = put_record(writer, PACKET)
    cdef unsigned char *last
    if head == NULL:
        return False
    nnfmq_store32(head + 4, <uint32_t>((writer.end - head) // RECORD))
    nnfmq_store32(head + 8, <uint32_t>PySequence_Fast_GET_SIZE(inputs))
    nnfmq_store32(head + 12, <uint32_t>PySequence_Fast_GET_SIZE(outputs))
    nnfmq_store32(head + 16, <uint32_t>PySequence_Fast_GET_SIZE(slots))
    if not (put_arguments(writer, inputs, INPUT, INPUT_DIMENSION)
            and put_arguments(writer, outputs, OUTPUT, OUTPUT_DIMENSION) and put_slots(writer, slots)):
        return False
    last = put_record(writer, MEASURE)
    if last == NULL:
        return False
    nnfmq_store32(last + 4, measure)
    return writer.at == writer.end


cdef bytes new_packet(Writer *writer, Py_ssize_t records):
    """Return new bytes for that many records, and set `writer` to their beginning."""
    cdef bytes data = PyBytes_FromStringAndSize(NULL, RECORD * records)
    writer.at = <unsigned char *>PyBytes_AS_STRING(data)
    writer.end = writer.at + RECORD * records
    return data


cdef bytes try_encode_request(object inputs, object outputs, object slots, object measure):
    """Return the packet; None if it is left to the Python codec."""
    cdef Writer writer
    cdef bytes data
    cdef PyObject *first = <PyObject *>inputs
    cdef PyObject *second = <PyObject *>outputs
    cdef Py_ssize_t input_records = count_records(first, <PyObject *>RequestArgument, ARGUMENT_DIMENSIONS)
    cdef Py_ssize_t output_records = count_records(second, <PyObject *>RequestArgument, ARGUMENT_DIMENSIONS)
    if input_records < 0 or output_records < 0 or not nnfmq_is_list_or_tuple(<PyObject *>slots):
        return None
    if (measure is not NO and measure is not YES) or PySequence_Fast_GET_SIZE(<PyObject *>slots) > MAX_RECORDS:
        return None
    data = new_packet(&writer, 2 + input_records + output_records + PySequence_Fast_GET_SIZE(<PyObject *>slots))
    return data if put_request(&writer, first, second, <PyObject *>slots, measure is YES) else None


def encode_request(inputs, outputs, slots, measure=NO):
    """Return the packet of one request, see `_pycodec.encode_request`."""
    cdef bytes data = try_encode_request(inputs, outputs, slots, measure)
    return pycodec.encode_request(inputs, outputs, slots, measure) if data is None else data


# ------------------------------------------------------------------------------------------------ encode a result

cdef bint put_shapes(Writer *writer, PyObject *values) noexcept:
    cdef unsigned char *record
    cdef PyObject *shape
    cdef PyObject *dimensions
    cdef Py_ssize_t index
    for index in range(PySequence_Fast_GET_SIZE(values)):
        shape = PySequence_Fast_GET_ITEM(values, index)
        dimensions = nnfmq_get(shape, SHAPE_DIMENSIONS)
        record = put_record(writer, SHAPE)
        if record == NULL or not put_flag(record + 8, nnfmq_get(shape, SHAPE_IS_SUFFICIENT)):
            return False
        nnfmq_store32(record + 12, <uint32_t>PySequence_Fast_GET_SIZE(dimensions))
        if not put_dimensions(writer, dimensions, SHAPE_DIMENSION, 8):
            return False
    return True


cdef bint read_duration(object duration_ns, uint64_t *field) except -1:
    """Convert a duration for the wire; False if it is left to the Python codec. May run Python code."""
    if type(duration_ns) is not int:
        return False
    converted = to_packet_duration(duration_ns)
    if not 0 <= converted <= UINT64_MAX:
        return False
    field[0] = converted
    return True


cdef bint put_result(
    Writer *writer, uint32_t status, PyObject *shapes, uint64_t on_device, uint64_t in_driver
) noexcept:
    cdef unsigned char *head = put_record(writer, PACKET)
    cdef unsigned char *last
    if head == NULL:
        return False
    nnfmq_store32(head + 8, <uint32_t>((writer.end - head) // RECORD))
    nnfmq_store32(head + 12, status)
    nnfmq_store32(head + 16, <uint32_t>PySequence_Fast_GET_SIZE(shapes))
    if not put_shapes(writer, shapes):
        return False
    last = put_record(writer, TIMING)
    if last == NULL:
        return False
    nnfmq_store64(last + 8, on_device)
    nnfmq_store64(last + 16, in_driver)
    return writer.at == writer.end


cdef bytes try_encode_result(object status, object shapes, object timing):
    """Return the packet; None if it is left to the Python codec."""
    cdef Writer writer
    cdef bytes data
    cdef long number
    cdef uint64_t on_device = UINT64_MAX, in_driver = UINT64_MAX
    cdef Py_ssize_t records
    if type(status) is not ErrorStatus or type(timing) is not Timing:
        return None
    if timing is not NO_TIMING and not (  # before the shapes are measured, since it runs Python code
        read_duration(timing.time_on_device_ns, &on_device) and read_duration(timing.time_in_driver_ns, &in_driver)
    ):
        return None
    number = status
    if number > LAST_HIDL_STATUS:
        number = STATUSES[2]
    records = count_records(<PyObject *>shapes, <PyObject *>OutputShape, SHAPE_DIMENSIONS)
    if records < 0:
        return None
    data = new_packet(&writer, 2 + records)
    return data if put_result(&writer, <uint32_t>number, <PyObject *>shapes, on_device, in_driver) else None


def encode_result(status, shapes, timing=NO_TIMING):
    """Return the packet of one result, see `_pycodec.encode_result`."""
    cdef bytes data = try_encode_result(status, shapes, timing)
    return pycodec.encode_result(status, shapes, timing) if data is None else data


# ------------------------------------------------------------------------------------------------ decode
# Each of these returns None or NULL if the packet is malformed; the Python codec then raises the error.

cdef struct Cursor:  # the next record, and the end of the packet
    const unsigned char *at
    const unsigned char *end


cdef inline const unsigned char *read_record(Cursor *cursor, unsigned char kind) noexcept:
    """Return the next record and advance; NULL at the packet's end, or if the record is of another kind."""
    cdef const unsigned char *record = cursor.at
    if cursor.end - record < RECORD or record[0] != kind:
        return NULL
    cursor.at = record + RECORD
    return record


cdef inline uint64_t records_left(const Cursor *cursor) noexcept:
    return <uint64_t>(cursor.end - cursor.at) // RECORD


cdef const unsigned char *read_packet_information(Cursor *cursor, bytes data, Py_ssize_t size_at) noexcept:
    """Set the cursor to the beginning of `data` and read its packetInformation; `size_at` is packetSize's offset."""
    cdef const unsigned char *head
    cursor.at = <const unsigned char *>PyBytes_AS_STRING(data)
    cursor.end = cursor.at + PyBytes_GET_SIZE(data)
    head = read_record(cursor, PACKET)
    if head == NULL or <uint64_t>nnfmq_load32(head + size_at) * RECORD != <uint64_t>PyBytes_GET_SIZE(data):
        return NULL
    return head


cdef tuple read_dimensions(Cursor *cursor, uint32_t rank, unsigned char kind, Py_ssize_t offset):
    cdef const unsigned char *record
    cdef uint32_t index
    cdef tuple dimensions
    if rank > records_left(cursor):
        return None
    dimensions = PyTuple_New(rank)
    for index in range(rank):
        record = read_record(cursor, kind)
        if record == NULL:
            return None
        set_item(dimensions, index, nnfmq_load32(record + offset))
    return dimensions


cdef inline void set_item(tuple values, Py_ssize_t index, object item):
    Py_INCREF(item)  # PyTuple_SET_ITEM steals the reference
    PyTuple_SET_ITEM(values, index, item)


cdef object read_argument(Cursor *cursor, unsigned char operand, unsigned char dimension):
    cdef const unsigned char *record = read_record(cursor, operand)
    if record == NULL or record[4] > 1:
        return None
    dimensions = read_dimensions(cursor, nnfmq_load32(record + 20), dimension, 4)
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


cdef tuple read_arguments(Cursor *cursor, uint32_t count, unsigned char operand, unsigned char dimension):
    cdef tuple arguments = PyTuple_New(count)
    cdef uint32_t index
    for index in range(count):
        argument = read_argument(cursor, operand, dimension)
        if argument is None:
            return None
        set_item(arguments, index, argument)
    return arguments


cdef tuple read_slots(Cursor *cursor, uint32_t count):
    cdef tuple slots = PyTuple_New(count)
    cdef const unsigned char *record
    cdef uint32_t index
    for index in range(count):
        record = read_record(cursor, POOL)
        if record == NULL:
            return None
        set_item(slots, index, <int32_t>nnfmq_load32(record + 4))
    return slots


cdef object try_decode_request(bytes data):
    cdef Cursor cursor
    cdef const unsigned char *head = read_packet_information(&cursor, data, 4)
    cdef const unsigned char *last
    if head == NULL:
        return None
    if <uint64_t>1 + nnfmq_load32(head + 8) + nnfmq_load32(head + 12) + nnfmq_load32(head + 16) > records_left(&cursor):
        return None
    inputs = read_arguments(&cursor, nnfmq_load32(head + 8), INPUT, INPUT_DIMENSION)
    if inputs is None:
        return None
    outputs = read_arguments(&cursor, nnfmq_load32(head + 12), OUTPUT, OUTPUT_DIMENSION)
    if outputs is None:
        return None
    slots = read_slots(&cursor, nnfmq_load32(head + 16))
    last = read_record(&cursor, MEASURE)
    if slots is None or last == NULL or nnfmq_load32(last + 4) > 1 or cursor.at != cursor.end:
        return None
    request = nnfmq_new(RequestPacket)
    nnfmq_fill(request, REQUEST_INPUTS, inputs)
    nnfmq_fill(request, REQUEST_OUTPUTS, outputs)
    nnfmq_fill(request, REQUEST_SLOTS, slots)
    nnfmq_fill(request, REQUEST_MEASURE, YES if nnfmq_load32(last + 4) else NO)
    return request


cdef object read_shape(Cursor *cursor):
    cdef const unsigned char *record = read_record(cursor, SHAPE)
    if record == NULL or record[8] > 1:
        return None
    dimensions = read_dimensions(cursor, nnfmq_load32(record + 12), SHAPE_DIMENSION, 8)
    if dimensions is None:
        return None
    shape = nnfmq_new(OutputShape)
    nnfmq_fill(shape, SHAPE_DIMENSIONS, dimensions)
    nnfmq_fill(shape, SHAPE_IS_SUFFICIENT, record[8] == 1)
    return shape


cdef tuple read_shapes(Cursor *cursor, uint32_t count):
    cdef tuple shapes = PyTuple_New(count)
    cdef uint32_t index
    for index in range(count):
        shape = read_shape(cursor)
        if shape is None:
            return None
        set_item(shapes, index, shape)
    return shapes


cdef object read_timing(const unsigned char *record):
    cdef uint64_t on_device = nnfmq_load64(record + 8), in_driver = nnfmq_load64(record + 16)
    if on_device == UINT64_MAX and in_driver == UINT64_MAX:
        return NO_TIMING
    return Timing(from_packet_duration(on_device), from_packet_duration(in_driver))


cdef object try_decode_result(bytes data):
    cdef Cursor cursor
    cdef const unsigned char *head = read_packet_information(&cursor, data, 8)
    cdef const unsigned char *last
    if head == NULL or nnfmq_load32(head + 12) > LAST_HIDL_STATUS:
        return None
    if <uint64_t>1 + nnfmq_load32(head + 16) > records_left(&cursor):
        return None
    shapes = read_shapes(&cursor, nnfmq_load32(head + 16))
    last = read_record(&cursor, TIMING)
    if shapes is None or last == NULL or cursor.at != cursor.end:
        return None
    result = nnfmq_new(ResultPacket)
    nnfmq_fill(result, RESULT_STATUS, STATUSES[nnfmq_load32(head + 12)])
    nnfmq_fill(result, RESULT_SHAPES, shapes)
    nnfmq_fill(result, RESULT_TIMING, read_timing(last))
    return result


cdef inline bytes private_copy(object data):
    return data if type(data) is bytes else bytes(data)


cdef int raise_python_codec_error(object decode, bytes data) except -1:
    """Raise the Python codec's error for a packet that was rejected here."""
    decode(data)
    raise errors.GeneralFailure(f"the two codecs disagree: only the compiled one rejects {data.hex()}")


def decode_request(data):
    """Return the request in `data`, see `_pycodec.decode_request`."""
    cdef bytes packet = private_copy(data)
    request = try_decode_request(packet)
    if request is None:
        raise_python_codec_error(pycodec.decode_request, packet)
    return request


def decode_result(data):
    """Return the result in `data`, see `_pycodec.decode_result`."""
    cdef bytes packet = private_copy(data)
    result = try_decode_result(packet)
    if result is None:
        raise_python_codec_error(pycodec.decode_result, packet)
    return result
