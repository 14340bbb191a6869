"""The model repository: a process beside the driver that serves the model files of a directory by name.

    model_directory ── model_versions: which one to load ── import_process ──▶ version_import, in a child process
                                │                                 │
                     repository_server: clients ◀── model_repository ── driver_models: prepared in the driver

`service.repository_process` starts it as `python -m nnfmq.repository`. It is a client of the driver like any other. It
reads no model file itself: a child process does that for each version, because an importer may crash, or take all
memory.
"""
