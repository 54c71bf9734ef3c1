#!/bin/bash
if [ "$(tr -d "[:space:]" < /app/answer.txt)" = part-4100.bin ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
