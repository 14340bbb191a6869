"""The compilation of a model on a choice of devices: plan, preparation of each step, fallback."""
