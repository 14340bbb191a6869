"""The compiled core has the class of the Python core, with the same signatures."""

from nnfmq.client.model._pycopies import ArrayCopies as ArrayCopies
