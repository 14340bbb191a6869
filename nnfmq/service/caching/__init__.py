"""Caches of compiled models: the cache files of clients, the driver's program cache, and memory that workers share."""
