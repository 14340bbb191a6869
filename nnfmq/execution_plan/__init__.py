"""How a model is executed on several devices: choice of a device for each operation, steps, and their sub-models."""
