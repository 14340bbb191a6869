"""LiteRT's Python interface over nnfmq: one changed import moves a script into the driver.

    from nnfmq.compat.litert import Interpreter

Every public name of `ai_edge_litert.interpreter` 2.3 is here. docs/how-to/move-a-litert-script.md lists what differs.
"""

from nnfmq.compat.litert.interpreter import (
    Delegate,
    InterpreterWithCustomOps,
    LiteRtInterpreter,
    OpResolverType,
    SignatureRunner,
    load_delegate,
)

Interpreter = LiteRtInterpreter

__all__ = [
    "Delegate",
    "Interpreter",
    "InterpreterWithCustomOps",
    "OpResolverType",
    "SignatureRunner",
    "load_delegate",
]
