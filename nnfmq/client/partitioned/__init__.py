"""Models on several devices: compiled step by step, and executed as one model.

`runtime` has the devices of all drivers, as NNAPI's runtime sees them; `compilation` prepares the steps of a plan
(`planning`) and falls back to the CPU device; the other modules execute such a plan in each mode.
"""
