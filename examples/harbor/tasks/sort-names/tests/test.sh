#!/bin/bash
if printf "ahmed\njun\nlena\nmaria\nolu\n" | cmp -s - /app/sorted.txt; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
