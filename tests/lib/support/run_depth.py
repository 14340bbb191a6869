"""How much the tests explore: `NNFMQ_TEST_DEPTH=deep` adds the explorations and examples that take minutes.

The variable is read once, when the tests are collected.
"""

from __future__ import annotations

import os

import pytest

IS_DEEP = os.environ.get("NNFMQ_TEST_DEPTH") == "deep"
needs_depth = pytest.mark.skipif(not IS_DEEP, reason="NNFMQ_TEST_DEPTH=deep runs it; takes minutes")
