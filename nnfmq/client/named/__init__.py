"""Models of a driver's model repository: opened by name, and moved to new versions while they execute.

`repository` speaks with the repository, whose data is not trusted.
"""
