"""The driver's processes: the supervisor, the workers that it forks, and the embedded driver.

Modules here start and end processes and own what these share. They may import everything else of the driver.
"""
