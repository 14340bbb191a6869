"""Write files of torch.export, with inputs and what PyTorch computes in this process with one thread."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

torch: Any = import_module("torch")
nn = torch.nn
FOLDER = Path(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(1)


def write(name: str, module: Any, *cases: tuple[Any, ...], shapes: Any = None, is_functional: bool = False) -> Any:
    program = torch.export.export(module.eval(), cases[0], dynamic_shapes=shapes)
    if is_functional:
        program = program.run_decompositions({})
    torch.export.save(program, FOLDER / f"{name}.pt2")
    for number, inputs in enumerate(cases):
        with torch.inference_mode():
            given = {f"in{i}": array(tensor) for i, tensor in enumerate(inputs)}
            outputs = program.module()(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = {f"out{i}": array(tensor) for i, tensor in enumerate(outputs)}
        np.savez(FOLDER / f"{name}{number or ''}.npz", **given, **found)
    return program


def array(tensor: Any) -> Any:
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()


class Vision(nn.Module):  # type: ignore[misc, name-defined]
    """Convolutions, batch normalization, ReLU in place, a residual, dropout that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.relu, self.drop = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout()
        self.last = nn.Linear(8, 5)

    def forward(self, image: Any) -> Any:
        x = self.relu(self.norm(self.first(image)))
        x = self.relu(x + self.second(x))
        return self.last(self.drop(x.mean((2, 3)))).softmax(1)


class Transformer(nn.Module):  # type: ignore[misc, name-defined]
    """Attention over embeddings of int64 tokens; batch and length are open."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens: Any) -> Any:
        x = self.layer(self.embed(tokens))
        return x, x.argmax(-1)


class Types(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        return a + 1, ~b, c * c, d.relu()


class Found(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return x.nonzero()


class Counter(nn.Module):  # type: ignore[misc, name-defined]
    """A buffer that changes, and an input that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        x.mul_(2)
        self.total.add_(x)
        return self.total * 1


class Scaled(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any, n: int) -> Any:
        return x * n


class Pair(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any, y: Any) -> Any:
        return torch.cat((x, y))


class Number(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return x, x.shape[0]


class Long(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        y = x
        for _ in range(100):
            y = y @ x
        return y


class Huge(nn.Module):  # type: ignore[misc, name-defined]
    """Needs 10 GiB for a product."""

    def forward(self, x: Any) -> Any:
        return (x @ x.T).amax(1)


def models() -> None:
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
    write("vision", Vision(), (torch.randn(1, 3, 16, 16),))
    tokens = [(torch.randint(50, shape),) for shape in ((2, 4), (3, 7))]
    write("transformer", Transformer(), *tokens, shapes=({0: batch, 1: length},))
    half = torch.tensor([1.5, -1], dtype=torch.bfloat16)
    types = (torch.tensor(3.0), torch.tensor([True, False]), torch.tensor([1e-9, 3], dtype=torch.float64), half)
    write("types", Types(), types)
    write("found", Found(), (torch.tensor([0, 1, 0, 2.0]),))
    for name, is_functional in (("counter", False), ("functional", True)):
        program = torch.export.export(Counter(), (torch.ones(2),))
        program = program.run_decompositions({}) if is_functional else program
        torch.export.save(program, FOLDER / f"{name}.pt2")
    torch.export.save(torch.export.export(Scaled(), (torch.ones(2), 3)), FOLDER / "scaled.pt2")
    pair = torch.export.export(
        Pair(), (torch.ones(2, 2), torch.ones(4, 2)), dynamic_shapes=({0: batch}, {0: 2 * batch})
    )
    torch.export.save(pair, FOLDER / "pair.pt2")
    number = torch.export.export(Number(), (torch.ones(2),), dynamic_shapes=({0: batch},))
    torch.export.save(number, FOLDER / "number.pt2")
    torch.export.save(torch.export.export(Long(), (torch.ones(1200, 1200),)), FOLDER / "long.pt2")
    torch.export.save(torch.export.export(Huge(), (torch.ones(51200, 1),)), FOLDER / "huge.pt2")


# ----------------------------------------------------------------------------------------------------------------------
# Hostile files: each would write the file `written` when it is loaded or run.


def hostile_files() -> None:
    code = f"open({str(FOLDER / 'written')!r}, 'w')"

    class Writes:
        def __reduce__(self) -> Any:
            return exec, (code,)

    pickled, weights = io.BytesIO(), io.BytesIO()
    torch.save(Writes(), pickled)
    torch.save(dict(torch.export.load(FOLDER / "transformer.pt2").state_dict), weights)
    call = f"__import__('builtins').exec({code!r})"
    unquoted = f"exec(bytes({list(code.encode())}).decode())"
    graph = ("graph_module", "graph")
    changes: dict[str, Callable[[dict[str, bytes]], None]] = {
        "sample_inputs": lambda members: members.update({"data/sample_inputs/model.pt": pickled.getvalue()}),
        "weights": lambda members: members.update({"data/weights/model.pt": pickled.getvalue()}),
        "pickled_weight": lambda members: change(
            members, lambda config: set_pickled(config, members, pickled), "data/weights/model_weights_config.json"
        ),
        "size": lambda members: change(members, lambda model: set_size(at(model, *graph), call)),
        "size_object": lambda members: change(members, lambda model: set_size(at(model, *graph), {"as_string": call})),
        "number": lambda members: change(
            members, lambda model: at(model, *graph)["tensor_values"]["tokens"]["sizes"].append({"as_int": call})
        ),
        "operator": lambda members: change(members, lambda model: add_operator(at(model, *graph))),
        "object": lambda members: members.update({"data/constants/opaque_obj_0": pickled.getvalue()}),
        "guard": lambda members: change(members, lambda model: model.update(guards_code=[unquoted])),
        "name": lambda members: change(members, lambda model: rename(at(model, *graph), f"x = 0; {unquoted}; y")),
        "target": lambda members: change(members, lambda model: retarget(at(model, *graph), "torch.os.system")),
        "file": lambda members: change(
            members, lambda model: retarget(at(model, *graph), "torch.ops.aten.from_file.default")
        ),
        "save": lambda members: change(
            members, lambda model: retarget(at(model, *graph), "torch.ops.aten.save.default")
        ),
        "spec": lambda members: change(members, set_spec),
        "library": lambda members: members.update({"data/aotinductor/model/a.so": b"\x7fELF"}),
    }
    with zipfile.ZipFile(FOLDER / "transformer.pt2") as archive:
        original = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    for name, apply in changes.items():
        members = dict(original)
        apply(members)
        write_archive(f"hostile_{name}.pt2", members)
    write_archive("legacy.pt2", original | {"data/weights/model.pt": weights.getvalue()})
    write_archive("compressed.pt2", original, zipfile.ZIP_DEFLATED)


def write_archive(name: str, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(FOLDER / name, "w", compression) as archive:
        for member, content in members.items():
            archive.writestr(f"archive/{member}", content)


def change(members: dict[str, bytes], apply: Callable[[Any], object], name: str = "models/model.json") -> None:
    content = json.loads(members[name])
    apply(content)
    members[name] = json.dumps(content).encode()


def at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value[key]
    return value


def set_pickled(config: Any, members: dict[str, bytes], pickled: io.BytesIO) -> None:
    next(iter(config["config"].values())).update(use_pickle=True, path_name="weight_0")
    members["data/weights/weight_0"] = pickled.getvalue()


def add_operator(graph: Any) -> None:
    graph["nodes"][-1]["inputs"].append({"name": "f", "arg": {"as_operator": "torch.os.system"}, "kind": 1})


def set_size(graph: Any, call: Any) -> None:
    graph["tensor_values"]["tokens"]["sizes"][0]["as_expr"]["expr_str"] = call


def rename(graph: Any, name: str) -> None:
    text = json.dumps(graph).replace(json.dumps("embedding"), json.dumps(name))
    graph.update(json.loads(text))


def retarget(graph: Any, target: str) -> None:
    graph["nodes"][-1]["target"] = target


def set_spec(model: Any) -> None:
    (entry, *_) = model["graph_module"]["module_call_graph"]
    context = json.dumps({"default_factory_module": "antigravity", "default_factory_name": "fly", "dict_context": []})
    entry["signature"]["in_spec"] = json.dumps(
        [1, {"type": "collections.defaultdict", "context": context, "children_spec": []}]
    )


if __name__ == "__main__":
    models()
    hostile_files()
