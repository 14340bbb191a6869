"""Caches of compiled programs: files of an application, the driver's own directory, and what workers share."""
