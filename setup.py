"""Build the compiled cores if Cython and a C compiler are available, and the man pages; all else is in pyproject.toml.

Without a compiler the package is complete and uses its Python cores, so a failed extension does not fail the
installation. `nnfmq doctor` reports which core is active, and why. The man pages are generated from the parsers of the
commands (`tools/man_pages.py`) and installed in share/man/man1.

Every installation from a source tree, not only an editable one, leaves the compiled cores beside their sources as well:
Python that runs in the tree imports the package from there, and would otherwise use the Python cores. Their file names
contain the ABI, so those of several Pythons coexist. `nnfmq.base.cores` warns if the sources of one have changed.
"""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from distutils.command.install_data import install_data  # isort: skip  setuptools provides it

SOURCES = sorted(Path("nnfmq").rglob("_*.pyx"))


class InstallManPages(install_data):
    """Generates the man pages when a wheel is built, and installs them."""

    def run(self) -> None:
        """Write the pages to the build folder, and install them from there."""
        root = Path(__file__).resolve().parent
        sys.path[:0] = [str(root), str(root / "tools")]
        import man_pages

        folder = Path(self.get_finalized_command("build").build_base, "man")
        pages = man_pages.write(folder, self.distribution.get_version())
        self.data_files = [("share/man/man1", list(map(str, pages)))]
        super().run()


class BuildInTree(build_ext):
    """Builds the extensions, and copies them to the source tree."""

    def run(self) -> None:
        """Build, copy what was built, and note from what; a tree that cannot be written stays as it is."""
        super().run()
        try:
            if not self.inplace:  # else they are there
                self.copy_extensions_to_source()
            self._write_stamps()
        except OSError as error:
            print(f"nnfmq: the source tree gets no compiled cores: {error}")

    def _write_stamps(self) -> None:
        root = Path(__file__).resolve().parent
        stamp = runpy.run_path(str(root / "nnfmq" / "base" / "build_stamp.py"))
        for module in self.extensions:
            built = root / self.get_ext_filename(module.name)
            if built.is_file():
                stamp["write_stamp"](built)


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


setup(
    ext_modules=extensions(),
    data_files=[("share/man/man1", [])],  # not empty, or setuptools would not call `InstallManPages`
    cmdclass={"build_ext": BuildInTree, "install_data": InstallManPages},
)
