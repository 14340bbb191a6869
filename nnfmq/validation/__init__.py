"""What decides whether a model, a request or another value is legal, and which feature level it needs.

The app's side asks early, for good messages; the driver asks again, since it does not trust the app.
Nothing here computes or allocates in proportion to what a model claims. The other values are in `values`, and how
values pass between levels in `conversion`.
"""

from __future__ import annotations

from nnfmq.validation.model import validate_model
from nnfmq.validation.request import validate_request

__all__ = ["validate_model", "validate_request"]
