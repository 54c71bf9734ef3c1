"""The service: runners behind Unix sockets, and a gateway that speaks HTTP and executes nothing."""
