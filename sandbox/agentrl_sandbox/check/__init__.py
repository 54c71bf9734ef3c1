"""Conformance programs and attacks as data: what a sandbox must support and what it must withstand."""
