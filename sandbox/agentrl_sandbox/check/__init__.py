"""Conformance and attacks as data: what every sandbox should do and what none should let through."""
