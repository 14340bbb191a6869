"""Measure a driver: memory, isolation of clients, how these share cores or a hosted file, calls, deaths, sandbox.

    python tools/driver_bench.py memory                                 # 8 clients, 1,000 executions each: some minutes
    python tools/driver_bench.py isolation --sections kills --phases idle,copying --kills 10 --json
    python tools/driver_bench.py sharing --quick
    python tools/driver_bench.py classes                                # an interactive client beside two batch clients
    python tools/driver_bench.py hosting --model model.onnx
    python tools/driver_bench.py runtimes                               # what hosting adds to a runtime: eight minutes
    python tools/driver_bench.py calls                                  # burst, execute, execute_async: a minute
    python tools/driver_bench.py deaths                                 # how soon a death is noticed
    python tools/driver_bench.py sandbox                                # what the sandbox of workers costs
    python tools/driver_bench.py sandbox --of worker-start              # what exec costs beside fork

The modules driver_memory, driver_isolation, driver_sharing, driver_classes, driver_hosting, driver_runtimes,
driver_calls, driver_deaths and driver_sandbox say what each measures. At the end, also on Ctrl-C, all processes are
killed and all files removed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from bench_support import add_common_options, parser_for, run

BENCHMARKS = ("memory", "isolation", "sharing", "classes", "hosting", "runtimes", "calls", "deaths", "sandbox")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_support.run`."""
    parser = parser_for(__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="|".join(BENCHMARKS))
    words = sys.argv[1:] if argv is None else argv
    for name in BENCHMARKS:
        benchmark = commands.add_parser(name, allow_abbrev=False)
        if name in words[:1]:  # the module is imported only if it measures: `memory` must not import NumPy
            importlib.import_module(f"driver_{name}").add_options(benchmark)
        add_common_options(benchmark)
    options = parser.parse_args(words)
    chosen = importlib.import_module(f"driver_{options.benchmark}")
    return run(options, chosen.measure, chosen.tables, options.benchmark)


if __name__ == "__main__":
    sys.exit(main())
