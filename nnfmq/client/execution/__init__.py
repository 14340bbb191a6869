"""One execution of a prepared model, a module for each of the HAL's modes.

`requests` has what all modes share: the values that messages carry and the validation of replies.
"""
