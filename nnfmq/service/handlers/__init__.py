"""What the driver does for each call of a client, one file per object: devices, models, executions, bursts."""
