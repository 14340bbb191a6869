"""The messages of the control channel, and the data inside them: fields and their ranges.

A message is a msgpack map of its fields and `type`, which is the name of its class: renaming a class changes the
protocol. The data inside messages are arrays of their fields. A field rejects numbers that no type of the HAL can hold;
numbers that the HAL rejects with INVALID_ARGUMENT (preference, priority, deadlines) pass and are checked by the driver.

`control_protocol` defines which side may send which message in which state, and with how many file descriptors;
`driver` and `client` implement the calls. docs/reference/protocol.md documents the protocol.

These modules do not import `annotations` from `__future__`: annotations would be texts then, which msgspec compiles one
by one when it makes a decoder. That would take 2 of the 4 ms in which a process imports the protocol.
"""

from nnfmq.serialize.messages.common import *  # noqa: F403
from nnfmq.serialize.messages.devices import *  # noqa: F403
from nnfmq.serialize.messages.executions import *  # noqa: F403
from nnfmq.serialize.messages.models import *  # noqa: F403
