"""Conformance tests: read test models, run them on an engine or a driver, and evaluate the results.

Format and criteria are those of the test vectors' description; no test model is treated specially by its name.
`testmodels` reads them, `variants` derives further tests, `targets` executes, `criteria` compares outputs, `cases` runs
one test model with its variants, `runner` runs many, `results` and `html_report` report. `random_graphs` generates test
models, of the `random_classes` or of others that a caller defines.
"""
