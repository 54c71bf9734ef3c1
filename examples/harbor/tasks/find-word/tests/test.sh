#!/bin/bash
if [ "$(tr -d "[:space:]" < /app/answer.txt)" = /app/archive/2020/06/report.txt ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
