"""The model repository: a process beside the driver that serves the model files of a directory by name.

    models: the directory ── repository: which version to load ──▶ version_import, in a child process
                                 │                  │
                  server: clients ◀──────────────── models: prepared in the driver

`driver.process.workers` starts it as `python -m nnfmq.repository`. It is a client of the driver like any other. It
reads no model file itself: a child process does that for each version, because an importer may crash, or take all
memory.
"""
