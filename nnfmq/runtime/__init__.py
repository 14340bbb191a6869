"""The application's process: connect to a driver, prepare models, execute them. Never imports `service`."""
