#!/bin/bash
if [ "$(cd /app/notes && cat friday.md monday.md tuesday.md)" = "$(printf "note of friday\nnote of monday\nnote of tuesday")" ] && [ "$(ls /app/notes | wc -l)" = 3 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
