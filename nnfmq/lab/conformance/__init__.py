"""Conformance tests: read test models, run them on an engine or a driver, and evaluate the results.

Format and criteria are those of the test vectors' description; no test model is treated specially by its name.
`testmodels` reads them and derives further tests, `targets` executes, `criteria` compares outputs, `cases` runs one
test model with its variants, `runner` runs many, `results` reports. `random_graphs` generates test models.
"""
