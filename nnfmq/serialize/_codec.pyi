"""The compiled codec has the names of `packet`, its specification, to the letter."""

from nnfmq.serialize.packet import Decoder as Decoder
from nnfmq.serialize.packet import RequestTemplate as RequestTemplate
from nnfmq.serialize.packet import decode_request as decode_request
from nnfmq.serialize.packet import decode_result as decode_result
from nnfmq.serialize.packet import encode_request as encode_request
from nnfmq.serialize.packet import encode_result as encode_result
