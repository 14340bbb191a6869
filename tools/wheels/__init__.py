"""Wheels for x86-64 and AArch64, built and checked by `python tools/wheels` on any x86-64 Linux.

HEAD is built, never the working tree, by zig's C compiler against the symbols of an old glibc, so that the wheels ask
for no more than their tag says wherever they were built. Built twice, in two folders, they are the same bytes. Modules:
`pythons` (which interpreters), `build` (tree → wheel), `contents` and `binary` (what is in it), `trial` (install and
use it), `command` (the order of things and the report). Not here: uploading, signing, musl, other systems.
"""
