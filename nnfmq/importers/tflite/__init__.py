"""Import of .tflite files: `model` converts a file, `operators` the operators by name.

`flatbuffers` reads the untrusted file, `file` has its records, and `interface` what it says of itself.
"""
