"""The compiled core has the classes and functions of the Python core, with the same signatures."""

from nnfmq.observe._pyrecorder import BurstRecorder as BurstRecorder
from nnfmq.observe._pyrecorder import ModelRecorder as ModelRecorder
from nnfmq.observe._pyrecorder import begin_change as begin_change
from nnfmq.observe._pyrecorder import end_change as end_change
from nnfmq.observe._pyrecorder import snapshot as snapshot
