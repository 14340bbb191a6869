"""The client library: connect to a driver, prepare models, execute them. Never imports `service`."""
