"""The client library: connect to a driver, prepare models, execute them.

`connection` has the control channel and the devices behind it, `model` the prepared models and the arrays and buffers
that they take, `execution` one execution in each of the HAL's modes, `burst` many over two queues, `named` the models
that a driver serves by name, and `partitioned` models that run on several devices.

Never imports `driver`: what the two share is data (`serialize`, `hal`). May import importers, planning, recording and
telemetry, and what both sides share.
"""
