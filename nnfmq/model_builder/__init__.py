"""Models built operand by operand, as with NNAPI, and the changes that NNAPI makes to a finished model."""
