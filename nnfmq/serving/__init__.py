"""Inference servers over a driver: models by name for other machines, through the Open Inference Protocol or Ray Serve.

`inference_service` has the interface between the protocols and what serves the models.
"""
