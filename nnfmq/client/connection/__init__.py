"""A client's connection to a driver: its start, its calls, the driver's death and what follows it.

`connect` reaches a driver or starts an `embedded` one; `connection` is the client's end of the control channel;
`client` and `device` are what applications hold; `recovery` connects again after a death; `garbage` closes what
applications drop. Modules of `client.model` and `client.partitioned` are built on these.
"""
