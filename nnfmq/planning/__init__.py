"""Plans: which device executes which operations of a model, and the sub-models of the steps.

Pure functions over models and descriptions of devices; nothing here knows a driver. May import `hal`, `validation` and
`operations`.
"""
