"""Serialization of burst packets, models and control messages. No I/O, no logging."""
