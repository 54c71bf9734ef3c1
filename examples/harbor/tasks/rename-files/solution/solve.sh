#!/bin/bash
set -e
cd /app/notes
for name in *.txt; do mv "$name" "${name%.txt}.md"; done
