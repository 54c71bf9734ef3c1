"""Which files of this folder are not tests."""

collect_ignore = ["toy_engine"]
"""A package that tests install elsewhere."""
