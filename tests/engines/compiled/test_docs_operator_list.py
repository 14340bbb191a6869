"""The page about the compiling engine lists the operations without kernels."""

from __future__ import annotations

import re

from support.places import ROOT

from nnfmq.engines.compiled.partition import LOWERING_RULES
from nnfmq.operations import HAL_DECLARATIONS


def test_the_page_lists_the_operations_without_a_lowering_rule() -> None:
    text = (ROOT / "docs" / "explanation" / "compiling-engine.md").read_text()
    listed = re.search(r"no kernel in any form: ([^.]+)\.", text)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == {
        code.name for code in HAL_DECLARATIONS if code not in LOWERING_RULES
    }
