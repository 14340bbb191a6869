"""The sandbox of a process: what the kernel lets it do from the moment on at which it enters.

`system_calls` has the system calls that are allowed, each group with its reason, `filter_program` makes the kernel's
program of them, `kernel` is the only module that asks the kernel, and `sandbox` enters.
docs/explanation/security-model.md says what it defends.
"""
