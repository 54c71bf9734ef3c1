#!/bin/bash
set -e
ls -S /app/data | head -n 1 > /app/answer.txt
