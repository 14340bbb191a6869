"""Bytes to values and back: burst packets, models, control messages. Pure: nothing here opens, maps, waits or logs."""
