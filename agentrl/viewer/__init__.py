"""`agentrl view` and `agentrl explain`: runs and evaluations in the browser, and single tokens in words.

Everything only reads files. ``explain``, ``what_if`` and ``calculations`` import torch; the web application does not
import them, and they do not import the web application.
"""
