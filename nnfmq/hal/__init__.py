"""The HAL's types, constants and errors, which client and driver share. No I/O."""
