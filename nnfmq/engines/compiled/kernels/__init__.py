"""Kernel generators by family. A kernel is a frozen dataclass that emits its code; equal kernels share one function."""
