"""Validation of models, requests and all other HAL values, and the feature level that each of them needs.

The client validates early, for good error messages; the driver validates again, because it does not trust the client.
No check computes or allocates in proportion to the sizes that a model claims. `values` validates everything other than
models and requests, `validation.interface_versions` converts values between interface versions.
"""

from __future__ import annotations

from nnfmq.validation.models import model_problems, validate_model
from nnfmq.validation.requests import validate_request

__all__ = ["model_problems", "validate_model", "validate_request"]
