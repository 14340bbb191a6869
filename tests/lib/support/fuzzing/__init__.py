"""The targets of tools/fuzz.py: functions of bytes, which raise if the code under test does anything wrong."""
