"""Search for inputs that the driver or the client library handles wrongly, guided by the code that each input reaches.

    python tools/fuzz.py driver --seconds 60           # mutated test models through the parts of a driver
    python tools/fuzz.py driver --seconds 3600 --keep  # and keep the inputs that reach new code
    python tools/fuzz.py onnx --seconds 60 --corpus F  # a decoder; the inputs found remain in the folder F
    python tools/fuzz.py decoders --seconds 60 --resume R  # each decoder, and add what was done to the file R
    python tools/fuzz.py decoders --seconds 0 --resume R   # what R has
    python tools/fuzz.py driver --input 0701a4         # one input: what it is, and what happens

A target is a function of bytes in tests/lib/support/fuzzing, which raises if anything is wrong. Atheris (libFuzzer)
changes inputs and keeps those that reach new lines of nnfmq, beginning with the target's corpus: a file of inputs in
hexadecimal, one a line; that of a decoder has, in addition, inputs that the encoders make. The tests run every input of
the corpora. If an input fails it is printed, and the exit status
is 1. The target `driver` needs the test models of $NNFMQ_DATA.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import results_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lib"))

from support.fuzzing import corpus  # noqa: E402

DECODERS = ("packets", "messages", "models", "descriptors", "tflite", "onnx", "caches", "toml", "http", "grpc")
"""The targets of bytes from a peer or a user; `decoders` cannot be imported before its code can be instrumented."""
TARGETS = {
    "api": "support.fuzzing.api_level:run_api",
    "driver": "support.fuzzing.driver_level:run_driver",
    "live": "support.fuzzing.live_driver:run_live",
    **{name: f"support.fuzzing.decoders:run_{name}" for name in DECODERS},
}
"""Name → module and function of a target."""
ALL_DECODERS = "decoders"
WORKER = "--worker"  # the first argument of the process that runs the target
MAX_INPUT_BYTES = 256
LIMIT_S, DECODER_LIMIT_S = 60, 20  # for one input
MEMORY_BYTES, DECODER_MEMORY_BYTES = 3 << 30, 1 << 30  # beyond what the process uses at the start

_PROGRESS = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")
_EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")


@dataclass(frozen=True)
class Campaign:
    """What a run of the fuzzer did: inputs run, edges of the code reached by the corpus and in the end, new inputs."""

    target: str
    cpu_s: float
    inputs: int
    edges_of_corpus: int
    edges: int
    new_inputs: int
    failing_input: str = ""
    error: str = ""


def load(target: str) -> Callable[[bytes], Any]:
    """Import the function of a target."""
    module, _, function = TARGETS.get(target, target).partition(":")
    loaded: Callable[[bytes], Any] = getattr(importlib.import_module(module), function)
    return loaded


# -- the process that runs the target ---------------------------------------------------------------------------------


def work(target: str, arguments: Sequence[str]) -> None:
    """Run a target in libFuzzer's loop with the code of nnfmq instrumented. Does not return.

    `arguments` are the name by which libFuzzer starts this process again, and its options.
    """
    try:
        import atheris
    except ModuleNotFoundError as error:
        raise SystemExit("the fuzzer is missing: pip install atheris") from error
    own = [] if target in TARGETS else [target.partition(":")[0]]
    with atheris.instrument_imports(include=["nnfmq", *own], enable_loader_override=False):
        function = load(target)
        function(b"")  # reads the test models, and imports what is imported when it is first needed
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    more = DECODER_MEMORY_BYTES if target in DECODERS else MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    atheris.Setup(list(arguments), function)
    atheris.Fuzz()


@contextmanager
def worker(target: str, folder: Path, options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start the process that runs a target, by a script, because libFuzzer starts it again by its name."""
    script = folder / "worker"
    command = shlex.join([sys.executable, __file__, WORKER, target])
    script.write_text(f'#!/bin/sh\nexec {command} "$0" "$@"\n')
    script.chmod(0o700)
    words = [str(script), *options]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# -- a campaign -------------------------------------------------------------------------------------------------------


def run(
    target: str, limits: Sequence[str], *, keep: bool = False, show: bool = False, kept_in: Path | None = None
) -> Campaign:
    """Run the fuzzer until a limit or a failing input; return what it did. `show` copies its progress to stderr.

    It begins with the files of the folder `kept_in`, too, and adds the inputs that it finds.
    """
    with tempfile.TemporaryDirectory(prefix="nnfmq-fuzz-") as made:
        folder = Path(made)
        known, found = folder / "corpus", kept_in or folder / "found"
        for each in (known, found):
            each.mkdir(parents=True, exist_ok=True)
        before = len(list(found.iterdir()))
        inputs = _beginning(target)
        for data in inputs:
            (known / sha256(data).hexdigest()[:16]).write_bytes(data)
        size = max([MAX_INPUT_BYTES, *(2 * len(data) for data in inputs)])
        options = [*_limits(target, folder), f"-max_len={size}", *limits, str(found), str(known)]
        begin_s = _children_cpu_s()
        with worker(target, folder, options) as process:
            lines = list(_copied(process, show))
            status = process.wait()
        cpu_s = _children_cpu_s() - begin_s
        if keep:
            corpus.write(target, _smallest_with_the_same_edges(target, folder, [known, found]))
        return _campaign(target, cpu_s, lines, folder, status, len(list(found.iterdir())) - before)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _beginning(target: str) -> list[bytes]:
    """Return the inputs with which the search begins."""
    inputs = corpus.read(target)
    if target in DECODERS:
        seeds: Callable[[], list[bytes]] = importlib.import_module("support.fuzzing.decoders").DECODERS[target][1]
        inputs += seeds()
    return inputs


def _limits(target: str, folder: Path) -> list[str]:
    return [
        f"-artifact_prefix={folder}/failing-",
        f"-timeout={DECODER_LIMIT_S if target in DECODERS else LIMIT_S}",
        "-rss_limit_mb=0",  # a limit of the address space makes the target raise instead of ending the process
        "-print_final_stats=1",
    ]


def _copied(process: subprocess.Popen[str], show: bool) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if show:
            sys.stderr.write(line)
        yield line


def _smallest_with_the_same_edges(target: str, folder: Path, sources: Sequence[Path]) -> list[bytes]:
    merged = folder / "merged"
    merged.mkdir()
    with worker(target, folder, [*_limits(target, folder), "-merge=1", str(merged), *map(str, sources)]) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the corpus could not be made smaller:\n{output[-3000:]}")
    return [path.read_bytes() for path in merged.iterdir()]


def _campaign(target: str, cpu_s: float, lines: Sequence[str], folder: Path, status: int, new_inputs: int) -> Campaign:
    text = "".join(lines)
    progress = [tuple(map(int, match.groups())) for match in _PROGRESS.finditer(text)] or [(0, 0, 0)]
    executed = _EXECUTED.search(text)
    failing = [path.read_bytes().hex() for path in folder.glob("failing-*")]
    if status and not failing:
        raise SystemExit(f"the fuzzer ended with status {status}:\n{text[-3000:]}")
    errors = [line.strip() for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Warning)\b", line)]
    return Campaign(
        target,
        round(cpu_s, 1),
        int(executed[1]) if executed else 0,
        progress[0][0],
        progress[-1][0],
        new_inputs,
        *([failing[0], errors[0] if errors else "no exception: a time limit, or the process ended"] if failing else []),
    )


# -- the command ------------------------------------------------------------------------------------------------------


def run_input(target: str, text: str) -> int:
    """Run one input, and print what it is and what happens; return the exit status."""
    function = load(target)
    module = sys.modules[function.__module__]
    data = bytes.fromhex(text)
    print(f"{target} {data.hex()}: {module.decode(data)!r}")
    print(f"result: {function(data)!r}")
    return 0


def add_to(path: Path, campaign: Campaign) -> None:
    """Add what a run did to the totals of its target in a file."""
    with results_file.changed(path, {}) as totals:
        total = totals.setdefault(campaign.target, {"runs": 0, "cpu_s": 0.0, "inputs": 0, "edges": 0, "failing": []})
        total["runs"] += 1
        total["cpu_s"] = round(total["cpu_s"] + campaign.cpu_s, 1)
        total["inputs"] += campaign.inputs
        total["edges"] = max(total["edges"], campaign.edges)
        total["failing"] += [campaign.failing_input] * bool(campaign.failing_input)


def print_totals(totals: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the totals of a file as a table."""
    from nnfmq.cli.console import console, table  # not before the target's code can be instrumented

    listing = table("target", ">runs", ">CPU, s", ">inputs", ">inputs a second", ">edges", ">failing")
    for target, total in sorted(totals.items()):
        rate = total["inputs"] / total["cpu_s"] if total["cpu_s"] else 0.0
        counts = total["runs"], total["cpu_s"], total["inputs"], rate, total["edges"], len(total["failing"])
        listing.add_row(target, *(f"{count:,.0f}" for count in counts))
    console(no_color=True).print(listing)


def print_campaign(campaign: Campaign) -> None:
    """Print what a run of the fuzzer did."""
    print(
        f"{campaign.target}: {campaign.inputs:,} inputs in {campaign.cpu_s:,.0f} s of CPU time; "
        f"{campaign.edges_of_corpus:,} edges of nnfmq's code reached by the corpus, {campaign.edges:,} in the end; "
        f"{campaign.new_inputs:,} new inputs"
    )
    if campaign.failing_input:
        print(f"FAILED: {campaign.error}\n  python tools/fuzz.py {campaign.target} --input {campaign.failing_input}")


_KNOWN = f"{', '.join(TARGETS)}, {ALL_DECODERS} (each of these)"


def _target(text: str) -> str:
    if text not in (*TARGETS, ALL_DECODERS) and not re.fullmatch(r"[\w.]+:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no target; there are {_KNOWN}, and MODULE:FUNCTION")
    return text


def _folder(text: str) -> Path:
    """Argparse type: a folder, which is made with those above it if it does not exist."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {error.strerror}") from error
    return path


def _file(text: str) -> Path:
    """Argparse type: a file, which need not exist, in a folder that does."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be a file: give one in a folder that exists")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=_target, help=f"{_KNOWN}, or a MODULE:FUNCTION that can be imported")
    parser.add_argument("--seconds", metavar="N", type=int, default=60, help="time limit; 0: run nothing (default: 60)")
    parser.add_argument("--runs", metavar="N", type=int, default=-1, help="limit of the number of inputs")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the fuzzer (default: random)")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument(
        "--corpus", metavar="FOLDER", type=_folder, help="begin with its files, too, and add new inputs"
    )
    parser.add_argument("--resume", metavar="FILE", type=_file, help="add what each run did to the totals of the file")
    parser.add_argument("--input", metavar="HEX", help="run this input only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.keep and options.target not in (*TARGETS, ALL_DECODERS):
        parser.error(f"--keep: {options.target} has no corpus")
    if options.input is not None:
        if options.target == ALL_DECODERS:
            parser.error(f"--input: an input is that of one decoder, not of {ALL_DECODERS}")
        return run_input(options.target, options.input)
    targets = DECODERS if options.target == ALL_DECODERS else (options.target,)
    campaigns = [_run_one(target, options) for target in targets if options.seconds]
    if options.resume is not None and not options.json:
        print_totals(results_file.content(options.resume, {}))
    return 1 if any(campaign.failing_input for campaign in campaigns) else 0


def _run_one(target: str, options: argparse.Namespace) -> Campaign:
    """Run the fuzzer, print what it did, and add that to the totals."""
    limits = [f"-max_total_time={options.seconds}", f"-runs={options.runs}", f"-seed={options.seed}"]
    folder: Path | None = options.corpus
    if folder is not None and options.target == ALL_DECODERS:
        folder = folder / target
    campaign = run(target, limits, keep=options.keep, show=sys.stderr.isatty(), kept_in=folder)
    if options.resume is not None:
        add_to(options.resume, campaign)
    if options.json:
        print(json.dumps(asdict(campaign)))
    else:
        print_campaign(campaign)
    return campaign


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(sys.argv[2], sys.argv[3:])
    sys.exit(main())
