"""Models that a driver has prepared: their classes and handles, and the arrays and buffers they take.

`compiled_model` is the interface of every model, `prepared_model` the one of a single device, and `handle` what all
modes of execution share. `arrays` and `array_request` are an application's arrays, `buffers` those of the driver.
"""
