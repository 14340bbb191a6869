"""The compiled core has the classes of the Python core, with the same signatures."""

from nnfmq.queue._pycore import EventFlagWord as EventFlagWord
from nnfmq.queue._pycore import Responder as Responder
from nnfmq.queue._pycore import Ring as Ring
