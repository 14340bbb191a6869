"""The compiled core has what the Python core has, with the same signatures."""

from nnfmq.observe._pytrace_core import ExchangeTrace as ExchangeTrace
from nnfmq.observe._pytrace_core import StepTrace as StepTrace
from nnfmq.observe._pytrace_core import TraceRing as TraceRing
from nnfmq.observe._pytrace_core import copy_names as copy_names
from nnfmq.observe._pytrace_core import copy_records as copy_records
