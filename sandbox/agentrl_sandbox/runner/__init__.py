"""The fork server: runs in processes of its own and imports nothing but the standard library and this package."""
