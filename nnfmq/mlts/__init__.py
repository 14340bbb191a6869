"""Android's Machine Learning Test Suite (MLTS) for this driver: a scoring benchmark and crash tests.

The benchmark: `model_list` names the models, `datasets` reads their data, `backends` and `litert_backend` execute them,
`evaluators` and `latencies` compute the metrics, `scoring` runs everything, `scoring_csv` and `scoring_page` report.

The crash tests: `crash_list` names them, `crash_workloads` is what a client does in them and `crash_client` the process
that does it, `driver_watch` notices that the driver has crashed, `crash_runner` runs and `crash_page` reports.
`child_programs` starts all processes.
"""
