"""What decides whether a model or a request is legal, and which feature level it needs.

The app's side asks early, for good messages; the driver asks again, since it does not trust the app.
Nothing here computes or allocates in proportion to what a model claims.
"""

from __future__ import annotations

from nnfmq.validation.model import validate_model
from nnfmq.validation.request import validate_request

__all__ = ["validate_model", "validate_request"]
