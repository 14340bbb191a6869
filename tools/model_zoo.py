"""Run models that packages on PyPI ship through nnfmq's driver, and compare each with LiteRT or ONNX Runtime.

    python tools/model_zoo.py                          # all models of model_zoo.toml, as a table
    python tools/model_zoo.py --only mediapipe --json
    python tools/model_zoo.py --folder DIR --device reference
    python tools/model_zoo.py --page                   # writes docs/explanation/model-zoo.md

Packages are downloaded by name into a cache. Each model runs in a process of its own, with limits of time and memory. A
model that the peer does not run does not count. Without --no-time nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_zoo_files import ZooEntry, ZooError, content, local_models, read_list
from rich.console import Console
from rich.table import Table

FLOAT_LIMIT = 1e-5
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "model-zoo.md"
_BEGIN, _END = "<!-- results: written by tools/model_zoo.py -->", "<!-- end of results -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the models that the arguments select; return 0 if each that the peer runs has the peer's results."""
    arguments = _arguments(argv)
    entries = list(local_models(arguments.folder)) if arguments.folder else read_list()
    entries = [entry for entry in entries if arguments.only in f"{entry.package}/{entry.file}"]
    results = []
    for number, entry in enumerate(entries, 1):
        print(f"model_zoo: {number} of {len(entries)}: {entry.name}", file=sys.stderr)
        results.append(examine(entry, arguments))
    if arguments.json:
        print(json.dumps({"models": results, "totals": totals(results)}, indent=2))
    else:
        _print(results)
    if arguments.page:
        write_page(results)
    return 0 if all(result["state"] in ("equal", "not counted") for result in results) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnfmq-model-zoo"
    parser.add_argument("--only", metavar="TEXT", default="", help="only models whose package or path contains it")
    parser.add_argument("--folder", metavar="DIR", type=Path, help="the models below a folder instead of the list")
    parser.add_argument("--device", choices=("compiled", "reference"), default="compiled")
    parser.add_argument("--cache", metavar="DIR", type=Path, default=cache, help=f"of packages (default: {cache})")
    parser.add_argument("--limit", metavar="S", type=float, default=300, help="of each model (default: 300)")
    parser.add_argument("--no-time", action="store_true", help="compare results only")
    parser.add_argument("--page", action="store_true", help="write the page of the documentation")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def examine(entry: ZooEntry, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was found of a model, with its state: equal, different, not run, or not counted."""
    described = {"package": entry.package, "file": entry.file, "format": entry.format}
    try:
        data = content(entry, arguments.cache)
    except (ZooError, OSError) as error:
        return {**described, "state": "not counted", "reason": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(entry.file).name
        path.write_bytes(data)
        job = {
            "path": str(path),
            "shapes": dict(entry.shapes),
            "values": dict(entry.values),
            "device": arguments.device,
            "measure": not arguments.no_time,
        }
        result = described | _run(job, arguments.limit)
    return result | {"state": state_of(result)}


def _run(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("model_zoo_run.py"))]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=limit_s, check=False
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"peer": True, "reason": f"it took more than {limit_s:g} s"}
    except (IndexError, ValueError):
        return {"peer": True, "reason": f"the process exited with status {done.returncode}: {done.stderr[-300:]}"}
    return result


def state_of(result: dict[str, Any]) -> str:
    """Return the state of a model's result."""
    if not result.get("peer"):
        return "not counted"
    if not result.get("runs"):
        return "not run"
    limit = max(FLOAT_LIMIT, 2 * result.get("rival", 0.0)) if result["float"] else 0.0
    return "equal" if result["difference"] <= limit else "different"


def totals(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return for each format how many models have each state."""
    counts = {kind: Counter(r["state"] for r in results if r["format"] == kind) for kind in ("tflite", "onnx")}
    return {kind: dict(count) for kind, count in counts.items() if count}


def _cells(result: dict[str, Any]) -> list[str]:
    name = " ".join(filter(None, (result["package"], Path(result["file"]).name)))
    shown = f"{result['difference']:.2g}" if "difference" in result else ""
    rival = f" ({result['rival']:.2g})" if "rival" in result else ""
    ratio = f"{result['us']:.0f} / {result['peer_us']:.0f} = {result['ratio']:.2f}" if "ratio" in result else ""
    reason = " ".join(_FOLDER.sub("", result.get("reason", "")).split())
    return [name, result["state"], shown + rival, ratio, reason]


_LONG_US = 50  # below it, the fixed cost of a burst decides
_MUCH_SLOWER = 1.5
_FOLDER = re.compile(r"/\S*/(?=\S)")
_HEADINGS = ("model", "result", "difference (the peer's)", "µs / the peer's", "reason")


def _print(results: Sequence[dict[str, Any]]) -> None:
    table = Table(*_HEADINGS)
    for result in results:
        table.add_row(*_cells(result))
    console = Console()
    console.print(table)
    for sentence in _sentences(results):
        console.print(sentence)


def write_page(results: Sequence[dict[str, Any]]) -> None:
    """Replace the results in the page of the documentation."""
    lines = [f"* {sentence}" for sentence in _sentences(results)]
    lines += ["", "| " + " | ".join(_HEADINGS) + " |", "|---" * len(_HEADINGS) + "|"]
    for result in results:
        lines.append("| " + " | ".join(cell.replace("|", "\\|")[:240] for cell in _cells(result)) + " |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    PAGE.write_text("\n".join([before + _BEGIN, "", *lines, "", _END + rest.partition(_END)[2]]), encoding="utf-8")


def _sentences(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the counts of each format, and of the models of all formats that take the peer longer than `_LONG_US`."""
    sentences = [
        f".{kind}: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        for kind, counts in totals(results).items()
    ]
    ratios = [result["ratio"] for result in results if result.get("peer_us", 0) > _LONG_US]
    if ratios:
        no_slower, much_slower = sum(r <= 1 for r in ratios), sum(r > _MUCH_SLOWER for r in ratios)
        sentences.append(
            f"{len(ratios)} models take the peer more than {_LONG_US} µs: {no_slower} of them are no slower here, "
            f"{much_slower} take more than {_MUCH_SLOWER} times as long"
        )
    return sentences


if __name__ == "__main__":
    sys.exit(main())
