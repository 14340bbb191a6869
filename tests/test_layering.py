"""The architecture as a test: who imports whom, one door per side effect, the house limits.

Each rule runs over the whole package, and over samples that break it: a checker that cannot fail checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import layering, places
from support.layering import Source

Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [
    layering.upward_imports,
    layering.upward_imports_of_the_client,
    layering.unexplained_imports,
    layering.back_doors,
    layering.over_the_limits,
]


def complaints(found: list[Source], *rules: Rule) -> list[str]:
    return [complaint for source in found for rule in rules for complaint in rule(source)]


def test_the_package_follows_the_rules_and_has_no_import_cycle() -> None:
    found = layering.sources(places.ROOT / "nnfmq")
    complained = complaints(found, *RULES)
    assert not complained, "\n".join(complained)
    assert layering.cycles(found) == []


@pytest.mark.parametrize("folder", ["tools", "tests/lib"])
def test_tools_and_tests_keep_the_size_limits(folder: str) -> None:
    found = complaints(layering.sources(places.ROOT / folder), layering.over_the_limits)
    assert not found, "\n".join(found)


def test_every_part_of_the_package_is_in_the_table() -> None:
    parts = {source.module.split(".")[0] for source in layering.sources(places.ROOT / "nnfmq")}
    assert parts <= set(layering.LAYERS)


def test_client_and_driver_do_not_import_each_other() -> None:
    assert "driver" not in layering.LAYERS["client"]
    assert "client" not in layering.LAYERS["driver"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("hal.types", "from nnfmq.base.memory import Memory"),
        ("queue.core", "from nnfmq.hal.types import Model"),
        ("queue.core", "from nnfmq.hal import types"),
        ("queue.core", "from ..hal import types"),
        ("client.run", "def f():\n    import nnfmq.driver.session.session"),
        (
            "driver.session.session",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nnfmq.client import client",
        ),
        ("driver.session.session", "from nnfmq import client"),
        ("driver.session.session", "import importlib\nimportlib.import_module('nnfmq.importers.tflite.model')"),
        ("driver.session.session", "import nnfmq"),
        ("base.memory", "from nnfmq import connect"),
        ("hal.errors", "from nnfmq.base import channel"),
        ("serialize.packets", "from nnfmq.serialize import packets\nfrom nnfmq.queue import layout"),
        ("observe.log", "from nnfmq.base.memory import Memory"),
        ("", "from nnfmq.driver.devices.device import DeviceBase"),
        ("plugins", "import sys"),
    ],
)
def test_an_import_upward_is_found(module: str, text: str) -> None:
    assert complaints([Source(module, text)], layering.upward_imports) != []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("queue.core", "from nnfmq.hal import errors\nfrom nnfmq.hal.errors import QueueCorrupted"),
        ("queue.core", "from nnfmq.queue.layout import compute_layout\nfrom nnfmq.observe import logging"),
        ("cli.run", "import nnfmq\nfrom nnfmq.driver.process.supervisor import serve"),
        ("", "from nnfmq.client.connection.connect import connect\nfrom nnfmq.importers import tflite"),
        ("client.run", "import numpy as np\nimport nnfmqtools"),
    ],
)
def test_an_import_downward_is_allowed(module: str, text: str) -> None:
    assert complaints([Source(module, text)], layering.upward_imports) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("client.waiting", "from nnfmq.client.model.arrays import Array"),
        ("client.model.handle", "from nnfmq.client import execution"),
        ("client.execution.fenced", "def f():\n    from nnfmq.client.burst import burst\n    import nnfmq.client.run"),
        ("client.model.new", "import sys"),
    ],
)
def test_an_import_upward_within_the_client_is_found(module: str, text: str) -> None:
    assert complaints([Source(module, text)], layering.upward_imports_of_the_client) != []


def test_an_import_of_the_same_layer_of_the_client_or_a_lower_one_is_allowed() -> None:
    text = "from nnfmq.client.execution import requests\nfrom nnfmq.client.model.handle import ModelHandle\nimport sys"
    assert complaints([Source("client.burst.burst", text)], layering.upward_imports_of_the_client) == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("def f():\n    import asyncio", True),
        ("class C:\n    async def f(self):\n        x = 1\n        from a import b", True),
        ("def f():\n    import asyncio  # slow", False),
        ("def f():\n    # slow\n    from a import (\n        b,\n    )", False),
        ("import asyncio", False),
    ],
)
def test_an_import_inside_a_function_of_the_client_without_a_reason_is_found(text: str, is_found: bool) -> None:
    assert bool(complaints([Source("client.run", text)], layering.unexplained_imports)) is is_found
    assert complaints([Source("cli.run", text)], layering.unexplained_imports) == []


def test_a_relative_import_of_a_package_starts_at_the_package() -> None:
    assert list(layering.imports(Source("queue", "from .core import core_name", is_package=True))) == [
        (1, "nnfmq.queue.core.core_name")
    ]


@pytest.mark.parametrize("line", ["import nnfmq.driver", "from nnfmq.driver cimport x", "    from nnfmq import client"])
def test_imports_of_a_cython_file_are_read(line: str) -> None:
    text = f"cdef extern from 'x.h':\n    pass\n{line}"
    assert complaints([Source("queue._core", text, is_cython=True)], layering.upward_imports) != []


@pytest.mark.parametrize(
    "edge",
    [
        "from nnfmq.a import y",
        "import nnfmq.a",
        "def f():\n    from nnfmq import a",
        "if TYPE_CHECKING:\n    import nnfmq.a",
    ],
)
def test_an_import_cycle_is_found(edge: str) -> None:
    found = [Source("a", "from nnfmq.b import x"), Source("b", f"from nnfmq.c import z\n{edge}"), Source("c", "")]
    assert layering.cycles(found) == [["a", "b"]]


def test_a_package_that_imports_its_modules_is_no_cycle() -> None:
    found = [
        Source("p", "from nnfmq.p import a", is_package=True),
        Source("p.a", "from nnfmq.p import b"),
        Source("p.b", ""),
    ]
    assert layering.cycles(found) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("client.run", "import socket"),
        ("driver.process.supervisor", "def f():\n    from socket import socketpair"),
        ("driver.process.supervisor", "peer.recvmsg(1)"),
        ("queue._pycore", "import mmap"),
        ("base.channel", "import os\nos.memfd_create('x')"),
        ("base.channel", "from os import memfd_create as m\nx = memfd_create"),
        ("serialize.control_protocol", "import pickle"),
        ("driver.session.session", "import multiprocess"),
        ("driver.process.supervisor", "import multiprocessing.connection"),
        ("driver.session.session", "import subprocess"),
        ("driver.compilation.jobs", "import os\nos.fork()"),
        ("engines.compiled.executor", "from os import fork\nfork()"),
        ("base.memory", "import ctypes"),
    ],
)
def test_an_import_of_a_private_module_is_found(module: str, text: str) -> None:
    assert complaints([Source(module, text)], layering.back_doors) != []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("base.channel", "import socket"),
        ("base.memory", "import mmap, os\nos.memfd_create('x')"),
        ("queue._pycore", "import ctypes"),
        ("driver.process.children", "import os\nos.fork()"),
        ("client.connection.embedded", "import subprocess"),
    ],
)
def test_an_import_of_the_public_module_is_allowed(module: str, text: str) -> None:
    assert complaints([Source(module, text)], layering.back_doors) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        '"""D."""\ndef f():\n' + "    x = 1\n" * 61,
        '"""D."""\n' + "x = 1\n" * 900,
        '"""D."""\ntry:\n    x()\nexcept Exception:\n    pass',
        '"""D."""\ntry:\n    x()\nexcept:\n    ...',
    ],
    ids=["no docstring", "long function", "long module", "swallowed", "swallowed bare"],
)
def test_a_violation_of_the_size_limits_is_found(text: str) -> None:
    assert len(complaints([Source("hal.types", text)], layering.over_the_limits)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""D."""\ndef f():\n    """Say.\n' + "\n" * 70 + '    """\n' + "    x = 1\n" * 60,
        '"""Long\nbecause the table is one."""\n' + "x = 1\n" * 900,
        '"""D."""\ntry:\n    x()\nexcept OSError:\n    pass',
    ],
    ids=["docstring does not count", "reason given", "named error"],
)
def test_code_within_the_size_limits_is_accepted(text: str) -> None:
    assert complaints([Source("hal.types", text)], layering.over_the_limits) == []
