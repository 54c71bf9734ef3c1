#!/bin/bash
set -e
awk -F, '$2 == "tea" { total += $3 } END { print total }' /app/sales.csv > /app/answer.txt
