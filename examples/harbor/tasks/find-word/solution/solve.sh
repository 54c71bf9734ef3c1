#!/bin/bash
set -e
grep -rl treasure /app/archive > /app/answer.txt
