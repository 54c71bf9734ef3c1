"""The service: runners behind Unix sockets, and an HTTP gateway that executes no programs."""
