"""The driver: the process that serves a client, and how.

`process` has the supervisor and its child processes, `session` what one client calls, `execution` the prepared models
and their modes of execution, `compilation` and `cache` how programs are made and kept, `memory` what a client may hold,
and `devices` what executes.

Never imports `client`: what the two share is data (`serialize`, `hal`).
"""
