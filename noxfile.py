"""`nox`: the quick tests on every supported Python of this machine; `nox -s ray`: tests of serving, with Ray.

`nox -s frameworks`: the devices that host OpenVINO, PyTorch and JAX.
"""

import os

import nox

RAY_TESTS = (
    "tests/serving",
    "tests/tools/test_ray_bench.py",
    "tests/test_documents.py::test_the_python_of_a_page_about_ray_runs[docs/tutorial/two-nodes.md]",
)

nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Install the package with the compiled core and run the quick tier, without the budgets of processor time.

    Options of pytest follow `--`; CI leaves directories out.
    """
    session.install(".[test]")
    session.run(
        "pytest",
        *session.posargs,
        "--deselect",
        "tests/test_public_api.py::test_importing_it_costs_little_beyond_numpy",
    )


@nox.session
def ray(session: nox.Session) -> None:
    """Install Ray and Triton's clients, and run the tests of serving: `nox -s ray`.

    With `-- --tier deep` a cluster gets 10,000 requests.
    """
    session.install(".[test,serving,ray]", "tritonclient[http,grpc]>=2.50")
    session.run("pytest", *(session.posargs or ["--tier", "full"]), *RAY_TESTS)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Install what CI does without, for the CPU only, and run the tests of the devices that host it.

    PyTorch's wheel for the CPU comes from its makers' index, or from the folder `$PIP_FIND_LINKS` where that is out of
    reach, and from no index of pip's configuration, which has the wheel for CUDA; what it depends on from pip's index.
    """
    wheels = "https://download.pytorch.org/whl/cpu"
    session.install("--no-deps", "torch>=2.13", "--index-url", wheels, env={"PIP_CONFIG_FILE": os.devnull})
    session.install(".[test]", "torch", "openvino>=2025.0", "jax>=0.10")
    session.run("pytest", *(session.posargs or ["--tier", "full"]), "tests/hosted")
