"""The compiled codec has the functions of `_pycodec`, which specifies it."""

from nnfmq.serialize._pycodec import decode_request as decode_request
from nnfmq.serialize._pycodec import decode_result as decode_result
from nnfmq.serialize._pycodec import encode_request as encode_request
from nnfmq.serialize._pycodec import encode_result as encode_result
