"""Measure the cost of the algorithms, one section at a time:

    python benchmarks/algorithms.py advantages [--rows 2048] [--width 8192] [--repeats 3] [--threads 2] [NAME ...]

Each section is a module `algorithms_SECTION.py` in this folder, whose docstring states its targets. `SECTION --help`
lists its options.
"""

import algorithms_advantages
from sections import run_section

SECTIONS = {"advantages": algorithms_advantages}

if __name__ == "__main__":
    run_section(__doc__, SECTIONS)
