"""The quick tests on every supported Python of this machine: `nox`, or `nox -s tests-3.12`."""

import nox

nox.options.error_on_missing_interpreters = False


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Install the package with the compiled core and run the quick tier, without the budgets of processor time."""
    session.install(".[test]")
    session.run("pytest", "--deselect", "tests/test_public_api.py::test_importing_it_costs_little_beyond_numpy")


@nox.session
def triton_clients(session: nox.Session) -> None:
    """Run Triton's clients against the inference protocols: 60 MB of packages that no other test needs."""
    session.install(".[test]", "tritonclient[http,grpc]>=2.50")
    session.run("pytest", "tests/serving/inference_protocol")
