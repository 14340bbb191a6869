"""Devices: their interface, the built-in ones, those of plug-ins, and the list of a driver's devices."""
