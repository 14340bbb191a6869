"""Bursts: series of executions over two message queues, or over the messages of AIDL's IBurst.

`burst` is the client's end of HIDL's burst, over the queues that `channel` has in one driver; `aidl` is that of AIDL's,
over the control channel. `pool` has bursts that threads share.
"""
