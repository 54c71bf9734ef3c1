"""Exit with status 0 if the report is right."""

import json

with open("/app/report.json", encoding="utf-8") as file:
    assert json.load(file) == {"ada": 1, "bob": 2}
