"""Test models as data: read them, run them through an engine or a driver, and judge what comes back.

The format and what passes are those of the test vectors' own description; nothing here knows a test by its name.
`testmodels` reads, `criteria` judges outputs, `variants` derives what the data leaves out, `targets` executes, `cases`
runs one test model with its variants, `running` runs many, `results` and `page` report. `random_graphs` makes test
models, of the `random_classes` or of others that a caller defines.
"""
