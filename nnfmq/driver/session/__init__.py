"""One client's session in a worker: the calls on the control channel, and what they do.

`session` has the client's objects, receives and dispatches; `calls` has the table of the handlers, which are functions
of a session and a message, in one module for each family of the HAL's methods.
"""
