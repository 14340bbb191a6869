"""Models of a driver's model repository: opened by name, and moved to new versions while they execute."""
