"""Versions and plug-ins of installed packages. The expected values are importlib.metadata's."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from nnfmq.base.packages import InstalledPackages, entry_points_of

METADATA = "Metadata-Version: 2.1\nName: Some.Pack_age\nVersion: 1.2.post3\nSummary: none\n\nVersion: 9, they say.\n"
ENTRY_POINTS = "[console_scripts]\nsome = some:main\n\n[nnfmq.devices]\nsome = some:Device\n"
FORMS = {
    "dist-info": {"some_pack_age-1.2.post3.dist-info/METADATA": METADATA},
    "dist-info with a name that is not normalized": {"Some.Pack_age-1.2.post3.dist-info/METADATA": METADATA},
    "egg-info folder": {"some_pack_age.egg-info/PKG-INFO": METADATA},
    "egg-info file": {"some_pack_age-1.2.post3.egg-info": METADATA},
    "egg": {"EGG-INFO/PKG-INFO": METADATA},
}

READS_AN_ARCHIVE = """
import sys, sysconfig
from nnfmq.base.packages import InstalledPackages
sys.path = [*sys.argv[1:], *(path for path in sys.path if path.startswith(sysconfig.get_path("stdlib")))]
sys.path = [path for path in sys.path if "site-packages" not in path]
packages = InstalledPackages()
print(packages.version("some-pack-age"), packages.version("other"))
print(packages.have_entry_points(["nnfmq.devices"]), packages.have_entry_points(["nnfmq.operations"]))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a folder that alone is on sys.path, beside a missing one; in the test's parameter is its name."""
    folder = tmp_path / getattr(request, "param", "site")
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), str(tmp_path / "missing")])
    return folder


def install(site: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_the_versions_of_all_installed_packages_are_those_of_importlib() -> None:
    packages = InstalledPackages()
    expected = {found.name: metadata.version(found.name) for found in metadata.distributions()}
    assert {name: packages.version(name) for name in expected} == expected
    assert len(expected) > 10


@pytest.mark.parametrize(
    ("site", "form"),
    [("some_pack_age-1.2.post3-py3.11.egg" if form == "egg" else "site", form) for form in FORMS],
    ids=list(FORMS),
    indirect=["site"],
)
def test_each_form_of_metadata_is_read(form: str, site: Path) -> None:
    install(site, FORMS[form])
    for name in ("some-pack-age", "Some_Pack_Age"):
        assert InstalledPackages().version(name) == metadata.version(name) == "1.2.post3"
    assert InstalledPackages().version("some") is None


def test_a_package_whose_metadata_state_no_version_has_none(site: Path) -> None:
    install(site, {"some-1.dist-info/METADATA": "Name: some\n\nVersion: 1\n", "other-1.dist-info/RECORD": ""})
    assert (InstalledPackages().version("some"), InstalledPackages().version("other")) == (None, None)


def test_the_first_folder_of_the_path_decides(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = site.parent / "second"
    for folder, version in ((site, "2"), (second, "1")):
        install(folder.parent, {f"{folder.name}/x": ""})
        install(folder, {f"some-{version}.dist-info/METADATA": f"Name: some\nVersion: {version}\n"})
    monkeypatch.setattr(sys, "path", [str(site), str(second)])
    assert InstalledPackages().version("some") == metadata.version("some") == "2"


def test_the_working_directory_is_searched_if_it_is_on_the_path(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, FORMS["dist-info"])
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", [""])
    assert InstalledPackages().version("some-pack-age") == "1.2.post3"


def test_entry_points_are_found_by_their_group(site: Path) -> None:
    install(site, FORMS["dist-info"])
    assert not InstalledPackages().have_entry_points(["nnfmq.devices"])
    install(site, {"some_pack_age-1.2.post3.dist-info/entry_points.txt": ENTRY_POINTS})
    assert InstalledPackages().have_entry_points(["nnfmq.operations", "nnfmq.devices"])
    assert not InstalledPackages().have_entry_points(["nnfmq.operations", "some"])
    assert [entry.value for entry in entry_points_of("nnfmq.devices")] == ["some:Device"]


def test_packages_in_an_archive_are_found_by_importlib(site: Path) -> None:
    archive = site / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("some_pack_age-1.2.post3.dist-info/METADATA", METADATA)
        file.writestr("some_pack_age-1.2.post3.dist-info/entry_points.txt", ENTRY_POINTS)
    # In another process, because importlib keeps archives open.
    command = [sys.executable, "-c", READS_AN_ARCHIVE, str(archive)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["1.2.post3 None", "True False"]


def test_packages_of_another_finder_are_found_by_importlib(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = site / "hidden"
    hidden.mkdir()
    install(hidden, FORMS["dist-info"])

    class Finder(metadata.DistributionFinder):
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(
            self, context: metadata.DistributionFinder.Context | None = None
        ) -> Iterator[metadata.Distribution]:
            inside = metadata.DistributionFinder.Context(name=context.name if context else None, path=[str(hidden)])
            yield from PathFinder.find_distributions(inside)

    assert InstalledPackages().version("some-pack-age") is None
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert InstalledPackages().version("some-pack-age") == "1.2.post3"
