"""The compiled core has the twin's classes, to the letter."""

from nnfmq.queue.twin import EventWord as EventWord
from nnfmq.queue.twin import Ring as Ring
