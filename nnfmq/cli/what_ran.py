"""What the commands say of a model's preparation: the device, the program that executes it, and how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = ["what_ran", "what_ran_text"]


def what_ran(model: CompiledModel, prepared_ns: int) -> dict[str, Any]:
    """Return the device, the kind of program, the operations that machine code executes, and the time, for a report.

    A model on several devices, and one of a plug-in's device, has the kind `other`.
    """
    program = getattr(model, "program", None)
    return {
        "device": model.device,
        "program": "other" if program is None else program.name.lower(),
        "compiled_operations": getattr(model, "compiled_operations", 0),
        "prepared_ns": prepared_ns,
    }


def what_ran_text(ran: dict[str, Any]) -> str:
    """Return the same as a line of text."""
    taken = f"{ran['prepared_ns'] / 1e6:,.0f} ms"
    if ran["program"] in ("compiled", "cached") and not ran["compiled_operations"]:
        return f"{ran['device']}: the interpreter, because no operation has a kernel, ready in {taken}"
    programs = {
        "compiled": f"machine code, compiled now in {taken}, for later starts as well",
        "cached": f"machine code from the cache, ready in {taken}",
        "interpreter": f"the interpreter, ready in {taken}",
        "baseline": f"the interpreter, ready in {taken}, until the model is compiled",
    }
    return f"{ran['device']}: {programs.get(ran['program'], f'ready in {taken}')}"
