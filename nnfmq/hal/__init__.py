"""The vocabulary that both processes share: the HAL's types, numbers and errors. Pure, no I/O."""
