"""Archives of `torch.export.save`, made safe to load: a new archive with the tensors and the graph of a client's file.

`torch.export.load` trusts what it reads. It unpickles custom objects, sample inputs and older weights, loads libraries
of AOTInductor, evaluates the expressions of sizes and the guards as Python, compiles the names of the graph as Python,
and calls whatever attribute of `torch` a node names. So nothing of a client's archive reaches it but

* raw tensors that are stored, not compressed, and their descriptions;
* the graph, if its names are identifiers, its expressions calls of known functions with numbers and symbols, and its
  operators those of `aten` and `prims` that the dispatcher knows, which have no access to files, or a few functions
  that compute sizes and control flow.

Everything else is left out where the graph does not need it (sample inputs, metadata, guards), otherwise refused by
name. The reader of the archive is Python's; torch reads only the archive written here.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import zipfile
from collections.abc import Callable
from types import NoneType
from typing import Any

from nnfmq.hal.errors import InvalidArgument

__all__ = ["safe_archive"]

_MODEL = "models/model.json"
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_MARKS = ("archive_format", "archive_version", "byteorder", "version", ".data/version", ".data/serialization_id")
_TENSOR = re.compile(r"data/weights/(weight_\d+)|data/constants/(tensor_\d+)")
_PATH = re.compile(r"(weight|tensor)_\d+")
_NOT_NEEDED = re.compile(r"data/sample_inputs/|extra/")
_MARK_BYTES = 128

_FUNCTIONS = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|math\.(trunc|floor|ceil)|torch\.sym_(int|float|max|min|not|ite|sum)"
    r"|torch\.ops\.higher_order\.(cond|while_loop|wrap_with_set_grad_enabled|wrap_with_autocast)"
)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_OPERATORS_OF_FILES = ("from_file",)
_CALLS = re.compile(
    "FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|FloatTrueDiv|IntTrueDiv"
    "|Identity|TruncToFloat|TruncToInt|RoundToInt|ToFloat|Symbol|Integer|Float|Rational|Add|Mul|Max|Min|And|Or|Not"
    "|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|floor|ceiling"
)
"""What an expression of sizes may call, as torch and SymPy print it; no powers, whose values have no bound."""
_TEXTS = (
    "type", "as_string", "as_strings", "as_float", "as_floats", "parameter_name", "buffer_name",
    "tensor_constant_name", "user_input_name", "path_name", "verifiers", "torch_version", "fqn",
)  # fmt: skip
"""The fields, beside names, targets and expressions, whose texts torch takes as data."""
_NUMBERS = frozenset(("as_int", "min_val", "max_val"))
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,20})?")
_EXPRESSION_CHARACTERS = 4096


def safe_archive(data: memoryview, is_known: Callable[[str], bool]) -> io.BytesIO:
    """Return an archive that `torch.export.load` can read without running anything of a client's.

    Args:
        data: The client's file.
        is_known: Whether the dispatcher has an operator: "aten::add.Tensor".

    Raises:
        InvalidArgument: If the file is none of `torch.export.save`, or needs what is not safe; the message names it.
    """
    members = _members(data)
    if _MODEL not in members:
        raise InvalidArgument(
            "not an archive of torch.export.save, or one of an older PyTorch: save it with a newer one"
        )
    for name in members.keys() & _CONFIGS:
        _check_payloads(_parsed(members[name]))
    program = _safe_program(_parsed(members[_MODEL]), is_known)
    written = {**members, _MODEL: json.dumps(program).encode(), _SAMPLE_INPUTS: b""}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in written.items():
            archive.writestr(f"archive/{name}", content)
    buffer.seek(0)
    return buffer


def _members(data: memoryview) -> dict[str, bytes]:
    """Return the members that are kept, by name without the folder that all are in."""
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos, total_bytes = archive.infolist(), 0
        for info in infos:
            folder, _, name = info.filename.partition("/")
            if _NOT_NEEDED.match(name) or not name:
                continue
            is_mark = name in _MARKS and info.file_size <= _MARK_BYTES
            if not (is_mark or name == _MODEL or name in _CONFIGS or _TENSOR.fullmatch(name)):
                raise _not_trusted(f"it has the member {info.filename!r:.80}")
            if info.compress_type != zipfile.ZIP_STORED or name in found or folder != infos[0].filename.split("/")[0]:
                raise InvalidArgument(f"the archive's member {info.filename!r:.80} is compressed, double or misplaced")
            total_bytes += info.file_size
            if total_bytes > len(data):  # several members are the same bytes of the file
                raise InvalidArgument("the members of the archive are larger than the file")
            found[name] = archive.read(info)
    return found


def _not_trusted(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"the file is not loaded, because {what}: a driver runs it only if $NNFMQ_TRUSTED_FILES has its SHA-256"
    )


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the archive has JSON that cannot be read: {error}") from error


def _check_payloads(config: Any) -> None:
    for payload in _field(config, "config", dict).values():
        path = _field(payload, "path_name", str)
        if payload.get("use_pickle") or not _PATH.fullmatch(path):
            raise _not_trusted(f"it has the pickled object {path!r:.80}")
        _check(payload, lambda _: False)


# ----------------------------------------------------------------------------------------------------------------------
# The graph.


def _safe_program(program: Any, is_known: Callable[[str], bool]) -> Any:
    """Return a program without what the execution does not need. Raises InvalidArgument if the rest is not safe."""
    module = _field(program, "graph_module", dict)
    for name in _field(program, "range_constraints", dict):
        if not _SYMBOL.fullmatch(name) and name[:1] in ("u", "z"):
            raise InvalidArgument(f"{name!r:.80} is no symbol of a size")
    safe = {
        **program,
        "guards_code": [],  # the sizes are checked by the caller
        "graph_module": {
            **module,
            "metadata": {},
            "treespec_namedtuple_fields": {},
            "module_call_graph": [{"fqn": "", "signature": None}],
        },
    }
    _check(safe, is_known)
    return safe


def _check(value: Any, is_known: Callable[[str], bool]) -> None:
    """Check a value of JSON and all that is in it, by the names of the fields of torch's schema.

    torch does not check the types of fields, so a text or an object may be only where one belongs.
    """
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        key, item = pending.pop()
        if key in _NUMBERS and not isinstance(item, (int, float, NoneType)):
            raise InvalidArgument(f"{key} is {item!r:.80} in the graph, not a number")
        if key == "expr_str":
            _check_expression(item)
        elif isinstance(item, str):
            _check_text(key, item, is_known)
        elif isinstance(item, list):
            pending.extend((key, inner) for inner in item)
        elif isinstance(item, dict):
            if "target" in item and "metadata" in item:  # a node
                item["metadata"] = {}
            pending.extend(item.items())


def _check_text(key: str, text: str, is_known: Callable[[str], bool]) -> None:
    if key == "target":
        _check_target(text, is_known)
    elif key in ("name", "as_name"):
        if text and (not text.isidentifier() or keyword.iskeyword(text)):
            raise InvalidArgument(f"{text!r:.80} is no name of a value in a graph")
    elif key not in _TEXTS:
        raise _not_trusted(f"its graph has {key} {text!r:.80}")


def _check_target(text: str, is_known: Callable[[str], bool]) -> None:
    """Check what a node of the graph calls."""
    if _FUNCTIONS.fullmatch(text):
        return
    match = _OPERATOR.fullmatch(text)
    if match is None:
        raise _not_trusted(f"its graph calls {text!r:.80}")
    space, name, overload = match.groups()
    qualified = f"{space}::{name}" if overload == "default" else f"{space}::{name}.{overload}"
    if name in _OPERATORS_OF_FILES or not is_known(qualified):
        raise _not_trusted(f"its graph calls {text!r:.80}")


def _check_expression(text: object) -> None:
    """Check an expression of sizes, which torch evaluates with SymPy, and SymPy as Python."""
    if not isinstance(text, str) or len(text) > _EXPRESSION_CHARACTERS:
        raise InvalidArgument("an expression of sizes is no text, or too long")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"{text!r:.80} is no expression of sizes") from error
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, caller = pending.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _CALLS.fullmatch(node.func.id):
            inner = [*node.args, *(keyword.value for keyword in node.keywords)]
            pending.extend((argument, node.func.id) for argument in inner)
        elif not _is_leaf(node, caller):
            raise _not_trusted(f"an expression of sizes is {text!r:.80}")


def _is_leaf(node: ast.AST, caller: str) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    if isinstance(node, ast.Name):
        return _SYMBOL.fullmatch(node.id) is not None or node.id in ("true", "false", "oo", "int_oo")
    if not isinstance(node, ast.Constant):
        return False
    if isinstance(node.value, str):
        pattern = {"Symbol": _SYMBOL, "Float": _NUMBER}.get(caller)
        return pattern is not None and pattern.fullmatch(node.value) is not None
    return isinstance(node.value, (bool, int, float))


def _field(value: Any, name: str, kind: type) -> Any:
    """Return a field of an object of JSON. Raises InvalidArgument if it is none, or of another type."""
    if not isinstance(value, dict) or not isinstance(value.get(name), kind):
        raise InvalidArgument(f"the archive's JSON has no {name!r} where torch.export.save writes it")
    return value[name]
