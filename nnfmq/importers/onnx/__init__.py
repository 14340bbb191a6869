"""Import of ONNX files: `model` converts a file, `operators` the nodes by the operator's name.

`file` and `interface` read a file without converting it; `schema` holds nodes against their operators' definitions;
`folding` evaluates what depends on constants alone; `loops` has Loop and Scan.
"""
