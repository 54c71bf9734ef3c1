"""The service: runners behind a Unix socket, and a gateway that speaks HTTP and executes nothing."""
