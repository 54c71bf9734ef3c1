"""Entry point of ``python -m agentrl_sandbox``, equivalent to the command ``agentrl-sandbox``."""

import sys

from agentrl_sandbox.service.commands import main

sys.exit(main())
