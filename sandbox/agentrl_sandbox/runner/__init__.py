"""The fork server, which runs in separate processes and imports only the standard library and this package."""
