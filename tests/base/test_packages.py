"""The versions of installed packages. NumPy's is what it says itself."""

from __future__ import annotations

import numpy as np

from nnfmq.base.packages import installed_version


def test_an_installed_package_has_its_version_and_another_one_has_none() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("nnfmq-is-not-the-name-of-a-package") is None
