"""record_transfer.py is a script for ranks that have vLLM, which most installations have not: it is not collected."""

collect_ignore = ["record_transfer.py"]
