#!/bin/bash
set -e
wc -l < /app/in.txt > /app/out.txt
