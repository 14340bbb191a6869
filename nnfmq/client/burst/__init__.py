"""Bursts: series of executions over two message queues, or over the messages of AIDL's IBurst.

`controller` is the client's end of HIDL's burst, over the queues that `channel` keeps in one driver after the other;
`aidl` is that of AIDL's. `model_burst` is the interface, and `configuration` chooses the class.
"""
