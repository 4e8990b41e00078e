"""Did an executed notebook say it? python ci/said.py NOTEBOOK REGEX...: prints its text; 1 if a pattern is missing."""

import re
import sys

import nbformat

nb = nbformat.read(sys.argv[1], 4)
outputs = [o for c in nb.cells if c.cell_type == "code" for o in c.outputs]
text = "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)
print(text)
missing = [p for p in sys.argv[2:] if not re.search(p, text)]
if missing:
    print("not said:", ", ".join(missing))
sys.exit(bool(missing))
