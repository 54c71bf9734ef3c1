"""`agentrl view` and `agentrl explain`: runs and evaluations in the browser, and explanations of single tokens.

The package only reads files of runs and evaluations. ``explain``, ``what_if`` and ``calculations`` import torch. The
web application does not import these modules, and they do not import the web application.
"""
