"""Modules that several tests share; `from support.x import ...` works because pytest adds `tests/lib` to the path.

The folder is not `tests` itself: a `tests/queue` that became a package there would hide the standard library's
`queue`. For the same reason no folder under `tests/` has an `__init__.py`.
"""
