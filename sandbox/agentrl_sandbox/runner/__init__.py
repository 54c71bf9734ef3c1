"""The fork server. Runs in separate processes, and imports only the standard library and this package."""
