"""Prepared models in the driver, and their executions: one at a time, over bursts, fenced and reusable.

`binding` binds a request to mapped memory; `order` and `turns` decide when an execution may compute.
"""
