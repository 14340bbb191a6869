"""Build the compiled cores if Cython and a C compiler are available; all other settings are in pyproject.toml.

Without them the package is complete and uses its Python cores, so a failed extension does not fail the installation.
`nnfmq doctor` reports which core is active, and why.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(Path("nnfmq").rglob("_*.pyx"))


def extensions() -> list[Extension]:
    """Return the extensions to build; none if Cython is not installed."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        print("nnfmq: Cython is not installed; installing without compiled cores")
        return []
    built = cythonize([extension(path) for path in SOURCES])
    for module in built:
        module.optional = True  # cythonize returns new Extension objects, without this attribute
    return built


def extension(path: Path) -> Extension:
    """Return the extension module of one .pyx file."""
    return Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        depends=[str(header) for header in Path("nnfmq").rglob("*.h")],
        extra_compile_args=["-O3", "-std=c11"],
    )


setup(ext_modules=extensions())
