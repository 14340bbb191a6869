"""One client's session in a worker: the calls on the control channel, and what they do.

`session` receives and dispatches; `calls` is what a session offers to the handlers of calls, which are in one module
for each family of the HAL's methods.
"""
