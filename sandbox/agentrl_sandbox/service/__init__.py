"""The service: runners behind a Unix socket, and a front that speaks HTTP and executes nothing."""
