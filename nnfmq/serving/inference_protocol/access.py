"""BearerTokens: who may use a server of the Open Inference Protocol, by a secret that clients send with each request.

Tokens come from a file: a command line or a variable can be read by other processes, and is kept in histories. The
health of the server is told without a token, because the probes of an orchestrator have none; all else needs one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from nnfmq.hal.errors import InvalidArgument
from nnfmq.serving.inference_protocol.errors import Unauthenticated

__all__ = ["BearerTokens"]

_SHORTEST = 16  # characters
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1
_SCHEME = "bearer "


class BearerTokens:
    """The tokens that a server accepts. Several are for a change: add the new one, change clients, remove the old one.

    Raises:
        InvalidArgument: If there is none, or one is shorter than 16 characters or has others than RFC 6750 allows.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        given = list(tokens)
        if not given:
            raise InvalidArgument("there is no token; write one into a line of its own, such as `openssl rand -hex 32`")
        for number, token in enumerate(given, start=1):
            if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
                raise InvalidArgument(
                    f"token {number} has {len(token)} characters; needed are {_SHORTEST} or more, of letters, digits"
                    " and . _ ~ + / -, such as `openssl rand -hex 32` prints"
                )
        self._digests = [_digest(token) for token in given]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> BearerTokens:
        """Return the tokens of a file, one in each line.

        Raises:
            OSError: If the file cannot be read.
            InvalidArgument: If it has no valid token; the message does not contain them.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8").split())
        except (InvalidArgument, UnicodeDecodeError) as error:
            reason = "it is no text" if isinstance(error, UnicodeDecodeError) else str(error)
            raise InvalidArgument(f"{os.fspath(path)}: {reason}") from None

    def require(self, authorization: str | None) -> None:
        """Check the header Authorization, in a time that says nothing about the tokens.

        Raises:
            Unauthenticated: If it is missing, or has none of the tokens.
        """
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("this server needs a token: send the header `Authorization: Bearer TOKEN`")
        given = _digest(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise Unauthenticated("the token of this request is not one of those that this server accepts")


def _digest(token: str) -> bytes:
    """Return a digest, so that a comparison does not depend on the length of a token."""
    return hashlib.sha256(token.encode("utf-8")).digest()
