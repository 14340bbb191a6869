"""Executes a model on several devices: PartitionedModel, over the prepared steps of an execution plan."""
