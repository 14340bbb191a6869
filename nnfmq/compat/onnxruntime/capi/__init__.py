"""The modules of ONNX Runtime from which programs import exceptions and classes."""
