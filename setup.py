"""Build the compiled cores where Cython and a C compiler are found; everything else is in pyproject.toml.

Without either the package is complete and runs on its Python implementation, so a failed extension never fails the
installation: `nnfmq doctor` says which core is active and why.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(Path("nnfmq").glob("*/_*.pyx"))


def extensions() -> list[Extension]:
    """Return the extensions to build: none where Cython is missing."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        print("nnfmq: no Cython here; installing without compiled cores")
        return []
    built = cythonize([extension(path) for path in SOURCES])
    for module in built:
        module.optional = True  # cythonize makes extensions of its own and forgets this
    return built


def extension(path: Path) -> Extension:
    """Return the extension module of one .pyx file."""
    return Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        depends=[str(header) for header in path.parent.glob("*.h")],
        extra_compile_args=["-O3", "-std=c11"],
    )


setup(ext_modules=extensions())
