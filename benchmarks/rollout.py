"""Measure the cost of rollouts, one section at a time:

    python benchmarks/rollout.py simulated
    python benchmarks/rollout.py vllm
    python benchmarks/rollout.py transfer

Each section is a module `rollout_SECTION.py` in this folder, whose docstring states its targets. `SECTION --help` lists
its options.
"""

import rollout_simulated
import rollout_transfer
import rollout_vllm
from sections import run_section

SECTIONS = {"simulated": rollout_simulated, "vllm": rollout_vllm, "transfer": rollout_transfer}

if __name__ == "__main__":
    run_section(__doc__, SECTIONS)
