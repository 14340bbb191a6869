"""Android's Machine Learning Test Suite (MLTS) for this driver: a scoring benchmark and crash tests.

The benchmark: `models` names the models and reads their data, `backends` execute them, `scoring` runs everything and
computes the metrics, and `reports` makes pages and CSV.

The crash tests: `crash_tests` names them, `crash_client` is the process of a client in them, `driver_watch` notices
that the driver has crashed, `crash_runner` starts all processes and watches them, and `reports` makes pages and CSV.
"""
