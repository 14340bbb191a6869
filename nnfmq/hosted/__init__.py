"""Devices that run model files of other runtimes: LiteRT, ONNX Runtime, OpenVINO, PyTorch, JAX.

`device` has the base class, which does everything that all of them share; the other modules are one adapter each, and
the only ones that import their runtime, in a worker, when a file is opened. `hal.hosted` lists the runtimes and has the
extension that a hosted model consists of; docs/how-to/host-a-runtime.md says how to write another adapter.
"""
