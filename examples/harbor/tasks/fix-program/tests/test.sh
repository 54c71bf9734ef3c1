#!/bin/bash
if [ "$(python3 /app/mean.py 1 2 3 6)" = 3.0 ] && [ "$(python3 /app/mean.py 5)" = 5.0 ] && [ "$(python3 /app/mean.py 1 2)" = 1.5 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
