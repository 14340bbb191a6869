# cython: language_level=3, embedsignature=True, binding=False
"""The compiled core of the copies. `_pycopies.py` is its specification and has the docstrings.

NumPy's assignment and `copy` look for a loop for the two dtypes and strides each time, which takes longer than to copy
some kilobytes. Here a contiguous array of at most SMALL_BYTES is copied with memmove, if its array interface
(`__array_struct__`, NumPy's protocol for C) says that it is like the one in shared memory. NumPy copies all others.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport intptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memmove

import numpy as np

cdef enum:
    C_CONTIGUOUS = 0x1  # flags of the array interface
    NOT_SWAPPED = 0x200
    SMALL_BYTES = 32768  # copied while this thread holds the GIL

# Version 3 of the array interface: PyArrayInterface in numpy/ndarraytypes.h.
ctypedef struct array_interface:
    int two
    int dimensions
    char kind
    int item_bytes
    int flags
    intptr_t *shape
    intptr_t *strides
    void *data

cdef object ndarray = np.ndarray
cdef object empty = np.empty
cdef bytes NUMBERS = b"biufc"  # kinds whose item size says all about them


cdef const array_interface *interface_of(object capsule) except NULL:
    return <const array_interface *>PyCapsule_GetPointer(capsule, NULL)


cdef struct Place:
    const array_interface *array  # NULL: NumPy copies it
    size_t size


cdef bint is_like(const array_interface *array, const array_interface *other) noexcept:
    return (
        array.dimensions == other.dimensions and array.kind == other.kind and array.item_bytes == other.item_bytes
        and array.flags & C_CONTIGUOUS and array.flags & NOT_SWAPPED
        and memcmp(array.shape, other.shape, array.dimensions * sizeof(intptr_t)) == 0
    )


@cython.final
cdef class ArrayCopies:
    """Copies arrays of an application into `inputs`, and `outputs` into new arrays."""

    cdef tuple inputs, outputs
    cdef list forms  # shape and dtype of each output
    cdef list capsules  # each keeps the interface of an array, and the array
    cdef Place *places  # of the inputs, then of the outputs

    def __cinit__(self, inputs, outputs, /):
        cdef const array_interface *found
        cdef Py_ssize_t index
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.forms = [(array.shape, array.dtype) for array in self.outputs]
        self.capsules = [array.__array_struct__ for array in self.inputs + self.outputs]
        self.places = <Place *>calloc(len(self.capsules) + 1, sizeof(Place))
        if self.places is NULL:
            raise MemoryError("copies of arrays")
        for index, array in enumerate(self.inputs + self.outputs):
            found = interface_of(self.capsules[index])
            if array.nbytes <= SMALL_BYTES and found.kind in NUMBERS and is_like(found, found):
                self.places[index] = Place(found, array.nbytes)

    def __dealloc__(self):
        free(self.places)

    def copy_in(self, values, /):
        cdef Py_ssize_t index
        if len(values) != len(self.inputs):
            return False
        for index in range(len(self.inputs)):
            value = values[index]
            if type(value) is not ndarray or not self.copy_one(index, value):
                return False
        return True

    cdef bint copy_one(self, Py_ssize_t index, object value) except -1:
        cdef const Place *place = &self.places[index]
        cdef const array_interface *source
        if place.array is not NULL:
            capsule = value.__array_struct__
            source = interface_of(capsule)
            if is_like(source, place.array):
                memmove(place.array.data, source.data, place.size)
                return True
        target = self.inputs[index]
        if value.dtype != target.dtype or value.shape != target.shape:
            return False
        target[...] = value
        return True

    def copy_out(self):
        cdef Py_ssize_t index
        return [self.copy_of(index) for index in range(len(self.outputs))]

    cdef object copy_of(self, Py_ssize_t index):
        cdef const Place *place = &self.places[len(self.inputs) + index]
        if place.array is NULL:
            return self.outputs[index].copy()
        shape, dtype = <tuple>self.forms[index]
        copy = empty(shape, dtype)
        capsule = copy.__array_struct__
        memmove(interface_of(capsule).data, place.array.data, place.size)
        return copy
