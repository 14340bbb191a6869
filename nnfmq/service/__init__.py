"""The driver process: who serves a client, and how. Never imports `runtime`: what the two share is data."""
