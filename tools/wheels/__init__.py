"""Wheels for x86-64 and AArch64, built and checked by `python tools/wheels` on any x86-64 Linux.

Wheels are built from HEAD, not from the working tree, with zig's C compiler and the symbols of an old glibc, so that
they need only what their tag promises on whichever machine they are built. Builds are reproducible. Modules:
`build` (interpreters, source tree to wheel), `checks` (files, extension modules, smoke test), `command` (runs all of
this and reports). Not supported:
uploading, signing, musl, other systems.
"""
