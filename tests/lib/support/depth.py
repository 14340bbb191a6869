"""How deep the proofs go: `NNFMQ_PROOF=deep` adds the explorations and examples that take minutes to those that do not.

Asked once, when the tests are collected; nothing else in the tests depends on the environment's patience.
"""

from __future__ import annotations

import os

import pytest

IS_DEEP = os.environ.get("NNFMQ_PROOF") == "deep"
needs_depth = pytest.mark.skipif(not IS_DEEP, reason="NNFMQ_PROOF=deep runs it; takes minutes")
