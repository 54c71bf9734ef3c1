#!/bin/bash
set -e
python3 - <<'END'
import collections, json

errors = collections.Counter()
for line in open("/app/events.jsonl"):
    event = json.loads(line)
    errors[event["user"]] += event["level"] == "error"
json.dump({user: count for user, count in errors.items() if count}, open("/app/report.json", "w"))
END
