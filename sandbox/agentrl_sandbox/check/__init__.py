"""Test cases for sandboxes: programs that must work and attacks that must fail."""
